#include "sync/liveness.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>

#include <cstdint>
#include <fstream>
#include <sstream>

namespace gradsync {
namespace {

// Linux 6.15 tells the exit status of any process behind a pidfd, child or not, once it is reaped.
// Declared here because the headers of the oldest supported system do not know it.
struct PidfdInfo {
  std::uint64_t mask;
  std::uint64_t cgroupid;
  std::uint32_t pid, tgid, ppid, ruid, rgid, euid, egid, suid, sgid, fsuid, fsgid;
  std::int32_t exit_code;
};
constexpr std::uint64_t pidfd_info_exit = 1U << 3;
constexpr unsigned long pidfd_get_info = _IOWR(0xFF, 11, PidfdInfo);

// A zombie's status stands in the last field but none of /proc/PID/stat.
bool status_of_zombie(int pid, int& status) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return false;
  const auto name_end = text.rfind(')');  // the name may hold spaces and parentheses
  if (name_end == std::string::npos) return false;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  constexpr int state_field = 3;
  constexpr int exit_code_field = 52;
  for (int number = state_field; number <= exit_code_field; ++number) {
    if (!(fields >> field)) return false;
    if (number == state_field && field != "Z" && field != "X") return false;
  }
  status = std::stoi(field);
  return true;
}

// The number that a process behind a pidfd has here, whatever it calls itself in its own namespace.
int pid_behind(const Fd& pidfd) {
  if (!pidfd.valid()) return 0;
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(pidfd.get()));
  std::string key;
  while (file >> key) {
    int pid = 0;
    if (key == "Pid:" && file >> pid) return pid;
  }
  return 0;
}

std::string describe(int status) {
  if (WIFSIGNALED(status)) {
    const char* name = ::sigabbrev_np(WTERMSIG(status));
    return "killed by signal " + std::to_string(WTERMSIG(status)) +
           (name != nullptr ? std::string(" (SIG") + name + ")" : "");
  }
  return "exited with code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

std::vector<int> Liveness::dead() const {
  std::vector<pollfd> entries;
  entries.reserve(pidfds_.size());
  for (const Fd& fd : pidfds_)
    entries.push_back({fd.get(), POLLIN, 0});  // poll skips negative ones
  std::vector<int> found;
  if (::poll(entries.data(), entries.size(), 0) <= 0) return found;
  for (std::size_t rank = 0; rank < entries.size(); ++rank) {
    if ((entries[rank].revents & POLLIN) != 0) found.push_back(static_cast<int>(rank));
  }
  return found;
}

std::string Liveness::what_it_does(int rank) const {
  const auto index = static_cast<std::size_t>(rank);
  const int pid = index < pidfds_.size() ? pid_behind(pidfds_[index]) : 0;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (pid <= 0 || !std::getline(file, text)) return "";
  const auto name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return "";
  switch (text[name_end + 2]) {
    case 'R': return "running native code";
    case 'S': return "asleep in native code";
    case 'D': return "waiting for a device";
    case 'T': return "stopped by a signal";
    case 't': return "stopped by a debugger";
    case 'Z':
    case 'X': return "ended";
    default: return "";
  }
}

std::string Liveness::how_it_ended(int rank, int pid) const {
  int status = 0;
  if (status_of_zombie(pid, status)) return describe(status);
  PidfdInfo info{};
  info.mask = pidfd_info_exit;
  const Fd& fd = pidfds_[static_cast<std::size_t>(rank)];
  if (fd.valid() && ::ioctl(fd.get(), pidfd_get_info, &info) == 0 &&
      (info.mask & pidfd_info_exit) != 0) {
    return describe(info.exit_code);
  }
  return "";
}

}  // namespace gradsync
