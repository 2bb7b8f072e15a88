#include "store/wire.h"

#include <array>
#include <cstring>
#include <limits>

namespace gradsync::store {
namespace {

constexpr std::uint32_t many = std::numeric_limits<std::uint32_t>::max();

// How many keys and values an operation takes; `many` is any number up to max_keys.
struct Shape {
  const char* name;
  std::uint32_t keys;
  std::uint32_t values;
  bool reply;
  bool counted;
};

constexpr std::array<Shape, static_cast<std::size_t>(Op::last) + 1> shapes{{
    {"nothing", 0, 0, false, false},
    {"set", 1, 1, false, false},
    {"get", 1, 0, true, false},
    {"add", 1, 0, true, true},
    {"compare_set", 1, 2, true, true},
    {"append", 1, 1, true, true},
    {"delete_key", 1, 0, true, true},
    {"check", many, 0, true, false},
    {"wait", many, 0, true, false},
    {"multi_get", many, 0, true, false},
    {"multi_set", many, many, true, true},
    {"num_keys", 0, 0, true, false},
    {"list_keys", 0, 0, true, false},
    {"queue_push", 1, 1, true, true},
    {"queue_pop", 1, 0, true, true},
    {"queue_len", 1, 0, true, false},
    {"barrier", 1, 0, true, true},
    {"ping", 0, 0, true, false},
    {"cancel", 0, 0, false, false},
    {"bye", 0, 0, false, false},
}};

const Shape& shape_of(Op op) { return shapes[static_cast<std::size_t>(op)]; }

bool fits(std::uint32_t count, std::uint32_t allowed) {
  return allowed == many ? count <= max_keys : count == allowed;
}

bool well_formed(const RequestHeader& header) {
  if (header.op < Op::set || header.op > Op::last || header.length > max_request_bytes) {
    return false;
  }
  const Shape& shape = shape_of(header.op);
  if (!fits(header.keys, shape.keys) || !fits(header.values, shape.values)) return false;
  return shape.values != many || header.keys == header.values;
}

bool take_string(std::string_view& rest, std::size_t limit, std::string_view& string) {
  std::uint32_t size = 0;
  if (rest.size() < sizeof(size)) return false;
  std::memcpy(&size, rest.data(), sizeof(size));
  rest.remove_prefix(sizeof(size));
  if (size > limit || size > rest.size()) return false;
  string = rest.substr(0, size);
  rest.remove_prefix(size);
  return true;
}

template <typename T>
void put(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace

const char* name_of(Op op) { return shape_of(op).name; }
bool has_reply(Op op) { return shape_of(op).reply; }
bool is_counted(Op op) { return shape_of(op).counted; }

Parsed parse_request(std::string_view bytes, Request& request, std::size_t& size) {
  RequestHeader& header = request.header;
  if (bytes.size() < sizeof(header)) return Parsed::incomplete;
  std::memcpy(&header, bytes.data(), sizeof(header));
  // Judged before the rest has arrived: a peer cannot make us collect what we will not accept.
  if (!well_formed(header)) return Parsed::malformed;
  if (bytes.size() - sizeof(header) < header.length) return Parsed::incomplete;
  std::string_view rest = bytes.substr(sizeof(header), header.length);
  request.keys.clear();
  request.values.clear();
  std::string_view string;
  for (std::uint32_t i = 0; i < header.keys; ++i) {
    if (!take_string(rest, max_key_bytes, string)) return Parsed::malformed;
    request.keys.push_back(string);
  }
  for (std::uint32_t i = 0; i < header.values; ++i) {
    if (!take_string(rest, max_value_bytes, string)) return Parsed::malformed;
    request.values.push_back(string);
  }
  if (!rest.empty()) return Parsed::malformed;
  size = sizeof(header) + header.length;
  return Parsed::complete;
}

Parsed parse_reply_header(std::string_view bytes, ReplyHeader& header) {
  if (bytes.size() < sizeof(header)) return Parsed::incomplete;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.length > max_reply_bytes || header.code > Code::system ||
      header.count > header.length / sizeof(std::uint32_t)) {
    return Parsed::malformed;
  }
  const bool whole = bytes.size() - sizeof(header) >= header.length;
  return whole ? Parsed::complete : Parsed::incomplete;
}

bool read_reply(std::string_view bytes, const ReplyHeader& header, Reply& reply) {
  std::string_view rest = bytes.substr(sizeof(header), header.length);
  reply.code = header.code;
  reply.number = header.number;
  reply.strings.resize(header.count);
  for (std::string& target : reply.strings) {
    std::string_view string;
    if (!take_string(rest, max_reply_bytes, string)) return false;
    target.assign(string);
  }
  return rest.empty();
}

std::size_t begin_request(std::string& out, const RequestHeader& header) {
  const std::size_t start = out.size();
  put(out, header);
  return start;
}

void end_request(std::string& out, std::size_t start) {
  const auto length = static_cast<std::uint32_t>(out.size() - start - sizeof(RequestHeader));
  std::memcpy(out.data() + start, &length, sizeof(length));
}

void put_string(std::string& out, std::string_view bytes) {
  put(out, static_cast<std::uint32_t>(bytes.size()));
  out.append(bytes);
}

void append_reply(std::string& out, std::uint64_t seq, bool counted, const Reply& reply) {
  std::size_t length = 0;
  for (const std::string& string : reply.strings) length += sizeof(std::uint32_t) + string.size();
  if (length > max_reply_bytes) {
    const std::string text = "the answer has " + std::to_string(length) + " bytes, the limit is " +
                             std::to_string(max_reply_bytes) + "; ask for fewer keys at a time";
    append_reply(out, seq, counted, Reply::error(Code::invalid, text));
    return;
  }
  ReplyHeader header;
  header.length = static_cast<std::uint32_t>(length);
  header.code = reply.code;
  header.counted = counted ? 1 : 0;
  header.seq = seq;
  header.number = reply.number;
  header.count = static_cast<std::uint32_t>(reply.strings.size());
  put(out, header);
  for (const std::string& string : reply.strings) put_string(out, string);
}

}  // namespace gradsync::store
