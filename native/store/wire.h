// The store's protocol after the handshake: framed requests and replies, and their limits.
//
//   request: length op - seq received timeout_ms number keys values | strings: keys, then values
//   reply:   length code flags - seq number count -                 | strings
//   string:  u32 length, bytes                       (all numbers little endian)
//
// One layout serves every operation, so there is one parser. `seq` ties a reply to its request;
// replies may come in any order. `received` counts the counted replies (see is_counted) that the
// client has got in this session; the server forgets those.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"

namespace gradsync::store {

static_assert(std::endian::native == std::endian::little, "the wire is little endian");

inline constexpr std::size_t max_key_bytes = std::size_t{64} << 10;
inline constexpr std::size_t max_value_bytes = std::size_t{256} << 20;
inline constexpr std::size_t max_request_bytes = std::size_t{512} << 20;
inline constexpr std::size_t max_reply_bytes = std::size_t{1} << 30;
inline constexpr std::size_t max_keys = std::size_t{128} << 10;

enum class Op : std::uint8_t {
  set = 1,
  get,
  add,
  compare_set,
  append,
  remove,
  check,
  wait,
  multi_get,
  multi_set,
  num_keys,
  list_keys,
  queue_push,
  queue_pop,
  queue_len,
  barrier,
  ping,
  cancel,  // give up on the parked request `number`
  bye,     // the session ends
  last = bye,
};

const char* name_of(Op op);

// Whether the server answers at all.
bool has_reply(Op op);

// Whether a second execution would do something else than the first. Replies to these are kept
// until the client has them, so that a request sent again after a reconnect is not done twice.
bool is_counted(Op op);

struct RequestHeader {
  std::uint32_t length = 0;  // of what follows the header
  Op op = Op::ping;
  std::uint8_t unused[3] = {};
  std::uint64_t seq = 0;
  std::uint64_t received = 0;
  std::int64_t timeout_ms = 0;  // 0 waits for ever
  std::int64_t number = 0;      // add: amount; barrier: participants; queue_pop: block; cancel: seq
  std::uint32_t keys = 0;
  std::uint32_t values = 0;
};
static_assert(sizeof(RequestHeader) == 48);

struct ReplyHeader {
  std::uint32_t length = 0;
  Code code = Code::ok;
  std::uint8_t counted = 0;
  std::uint8_t unused[2] = {};
  std::uint64_t seq = 0;
  std::int64_t number = 0;
  std::uint32_t count = 0;
  std::uint32_t unused2 = 0;
};
static_assert(sizeof(ReplyHeader) == 32);

// A request whose strings point into the buffer it was parsed from.
struct Request {
  RequestHeader header;
  std::vector<std::string_view> keys;
  std::vector<std::string_view> values;
};

// What an operation answers; the strings are values, keys or one error text.
struct Reply {
  Code code = Code::ok;
  std::int64_t number = 0;
  std::vector<std::string> strings;

  static Reply error(Code code, std::string text) { return {code, 0, {std::move(text)}}; }
  static Reply value(std::string bytes) { return {Code::ok, 0, {std::move(bytes)}}; }
  static Reply of(std::int64_t number) { return {Code::ok, number, {}}; }
};

enum class Parsed : std::uint8_t { incomplete, complete, malformed };

// Takes one request off the front of `bytes`. Only `complete` sets `size`, the bytes it took.
Parsed parse_request(std::string_view bytes, Request& request, std::size_t& size);

// Whether a whole reply stands at the front of `bytes`: `reply_bytes(header)` of them.
Parsed parse_reply_header(std::string_view bytes, ReplyHeader& header);
inline std::size_t reply_bytes(const ReplyHeader& header) { return sizeof(header) + header.length; }
// Takes the strings of a complete reply; false when they are malformed.
bool read_reply(std::string_view bytes, const ReplyHeader& header, Reply& reply);

// Starts a request frame at the end of `out` and returns where; `end_request` fills in its length.
std::size_t begin_request(std::string& out, const RequestHeader& header);
void end_request(std::string& out, std::size_t start);
void put_string(std::string& out, std::string_view bytes);

// Overwrites one field of the header at the front of a finished frame.
template <typename T>
void patch_request(std::string& frame, std::size_t offset, const T& value) {
  std::memcpy(frame.data() + offset, &value, sizeof(value));
}

void append_reply(std::string& out, std::uint64_t seq, bool counted, const Reply& reply);

}  // namespace gradsync::store
