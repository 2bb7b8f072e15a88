#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "common/cgroup.h"
#include "tests/ranks.h"

using namespace gradsync;
using namespace gradsync::testing;

TEST(segment_is_shared_between_mappings) {
  Segment first;
  CHECK_OK(Segment::create(1 << 20, first));
  Segment second;
  CHECK_OK(Segment::map(Fd(::dup(first.fd())), 1 << 20, second));
  CHECK(first.data() != second.data());
  first.data()[12345] = std::byte{42};
  CHECK(second.data()[12345] == std::byte{42});
}

TEST(segment_that_does_not_fit_is_an_error_and_not_a_signal) {
  Segment segment;
  const Status status = Segment::create(std::size_t{1} << 50, segment);
  CHECK(!status.ok());
  CHECK(status.code == Code::no_space);
  CHECK(segment.data() == nullptr);
}

TEST(segment_cannot_be_shrunk_under_a_peer) {
  Segment segment;
  CHECK_OK(Segment::create(1 << 16, segment));
  CHECK(::ftruncate(segment.fd(), 0) != 0);
  CHECK(errno == EPERM);
}

TEST(segment_refuses_memory_that_is_too_small_or_not_sealed) {
  Segment small;
  CHECK_OK(Segment::create(4096, small));
  Segment out;
  CHECK(Segment::map(Fd(::dup(small.fd())), 8192, out).code == Code::invalid);
  Fd open_ended(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(::ftruncate(open_ended.get(), 4096) == 0);
  CHECK(Segment::map(std::move(open_ended), 4096, out).code == Code::invalid);
}

TEST(handoff_passes_many_descriptors) {
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  const Fd left(ends[0]);
  const Fd right(ends[1]);
  const std::uint8_t message[3] = {1, 2, 3};
  const std::vector<int> many(300, left.get());
  std::thread sender([&] { CHECK_OK(send_descriptors(left, message, many, Deadline::after(5))); });
  std::uint8_t received[3] = {};
  std::vector<Fd> descriptors;
  CHECK_OK(receive_descriptors(right, received, 0, Deadline::after(5), Fd(), descriptors));
  CHECK_OK(receive_descriptors(right, {}, many.size(), Deadline::after(5), Fd(), descriptors));
  sender.join();
  CHECK(std::memcmp(message, received, 3) == 0);
  CHECK(descriptors.size() == many.size());
}

TEST(lobby_names_who_did_not_come) {
  Lobby lobby;
  CHECK_OK(Lobby::open(lobby));
  Fd guest;
  CHECK_OK(reach_lobby(lobby.name(), guest));
  CHECK_OK(introduce(guest, 2, lobby.secret()));
  std::vector<Guest> guests;
  const Status status = lobby.gather(4, Deadline::after(0.1), {}, guests);
  CHECK(status.code == Code::timeout);
  CHECK((status.ranks == std::vector<int>{1, 3}));
}

TEST(lobby_names_a_guest_that_died_on_its_way) {
  Lobby lobby;
  CHECK_OK(Lobby::open(lobby));
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::usleep(20'000);
    ::_exit(0);
  }
  std::vector<Fd> expected(3);
  CHECK_OK(open_pidfd(pid, expected[1]));
  std::vector<Guest> guests;
  const Status status = lobby.gather(3, Deadline::after(20), expected, guests);
  CHECK(status.code == Code::peer_lost);
  CHECK((status.ranks == std::vector<int>{1}));
  CHECK(exit_status(pid, 1) == 0);
}

TEST(lobby_drops_strangers_and_duplicates) {
  Lobby lobby;
  CHECK_OK(Lobby::open(lobby));
  Fd stranger, liar, twin, guest;
  CHECK_OK(reach_lobby(lobby.name(), stranger));
  const std::string request = "GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n";
  CHECK(::send(stranger.get(), request.data(), request.size(), MSG_NOSIGNAL) > 0);
  CHECK_OK(reach_lobby(lobby.name(), liar));
  CHECK_OK(introduce(liar, 1, Secret{}));
  CHECK_OK(reach_lobby(lobby.name(), guest));
  CHECK_OK(introduce(guest, 1, lobby.secret()));
  CHECK_OK(reach_lobby(lobby.name(), twin));
  CHECK_OK(introduce(twin, 1, lobby.secret()));
  std::vector<Guest> guests;
  const Status status = lobby.gather(3, Deadline::after(0.2), {}, guests);
  CHECK(status.code == Code::timeout);
  CHECK((status.ranks == std::vector<int>{2}));
  CHECK(guests.size() == 1);
}

TEST(lobby_that_waits_in_slices_lets_a_slow_guest_speak) {
  Lobby lobby;
  CHECK_OK(Lobby::open(lobby));
  std::thread slow([&] {
    Fd guest;
    CHECK_OK(reach_lobby(lobby.name(), guest));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK_OK(introduce(guest, 1, lobby.secret()));
  });
  std::vector<Guest> guests;
  Status status;
  const Deadline deadline = Deadline::after(20);
  do {
    status = lobby.gather(2, Deadline::after(0.01), {}, guests);
  } while (status.code == Code::timeout && !deadline.expired());
  CHECK_OK(status);
  slow.join();
}

struct KnownLobby {
  Lobby lobby;
  std::vector<Guest> guests;

  KnownLobby() {
    static int counter = 0;
    const std::string name = "test-" + std::to_string(::getpid()) + "-" + std::to_string(++counter);
    CHECK_OK(Lobby::open(name, Secret{1, 2, 3}, lobby));
  }
  Fd visit(int index, const std::string& words = "") const {
    Fd guest;
    CHECK_OK(reach_lobby(lobby.name(), guest));
    CHECK_OK(introduce(guest, index, lobby.secret(), words));
    return guest;
  }
  Status gather() { return lobby.gather(3, Deadline::after(20), {}, guests); }
};

TEST(lobby_hears_what_its_guests_say) {
  KnownLobby known;
  const std::string longest(most_words, 'x');
  const Fd second = known.visit(2, longest);
  const Fd first = known.visit(1, "hello");
  CHECK_OK(known.gather());
  CHECK(known.guests[0].words == longest);
  CHECK(known.guests[1].words == "hello");
  CHECK(introduce(first, 1, known.lobby.secret(), longest + "x").code == Code::invalid);
}

TEST(lobby_with_a_known_name_has_one_host) {
  const KnownLobby known;
  Lobby other;
  CHECK(!Lobby::open(known.lobby.name(), known.lobby.secret(), other).ok());
}

TEST(lobby_with_a_known_name_tells_of_guests_that_do_not_fit) {
  for (const int index : {0, 1, 3}) {
    KnownLobby known;
    const Fd first = known.visit(1);
    const Fd misfit = known.visit(index);
    CHECK(known.gather().code == Code::invalid);
  }
}

TEST(lobby_with_a_known_name_tells_of_guests_that_leave) {
  KnownLobby known;
  std::thread hasty([&] {
    const Fd guest = known.visit(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  const Status status = known.gather();
  CHECK(status.code == Code::peer_lost);
  CHECK((status.ranks == std::vector<int>{2}));
  hasty.join();
}

TEST(lobby_that_is_gone_is_an_error_at_once) {
  Fd socket;
  CHECK(reach_lobby("gradsync-lobby-nowhere", socket).code == Code::connection);
}

TEST(memory_left_is_the_least_on_the_way_up) {
  namespace fs = std::filesystem;
  const fs::path root =
      fs::temp_directory_path() / ("gradsync-memory-" + std::to_string(::getpid()));
  fs::create_directories(root / "a/b");
  std::ofstream(root / "self") << "0::/a/b\n";
  std::ofstream(root / "a/b/memory.max") << "max\n";
  std::ofstream(root / "a/memory.max") << "1000\n";
  std::ofstream(root / "a/memory.current") << "400\n";
  CHECK(cgroup_memory_left(root, root / "self") == 600);
  std::ofstream(root / "a/memory.stat") << "anon 250\nactive_file 100\ninactive_file 50\n";
  CHECK(cgroup_memory_left(root, root / "self") == 750);
  fs::remove_all(root);
}
