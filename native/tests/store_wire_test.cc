#include <cstring>
#include <random>
#include <string>

#include "store/wire.h"
#include "tests/check.h"

using namespace gradsync::store;
using gradsync::Code;

namespace {

std::string request(RequestHeader header, const std::vector<std::string>& strings) {
  std::string frame;
  const std::size_t start = begin_request(frame, header);
  for (const std::string& string : strings) put_string(frame, string);
  end_request(frame, start);
  return frame;
}

RequestHeader header_of(Op op, std::uint32_t keys, std::uint32_t values) {
  RequestHeader header;
  header.op = op;
  header.keys = keys;
  header.values = values;
  header.seq = 7;
  return header;
}

Parsed parse(const std::string& bytes) {
  Request parsed;
  std::size_t size = 0;
  return parse_request(bytes, parsed, size);
}

}  // namespace

TEST(request_comes_back_as_it_was_sent) {
  const std::string frame = request(header_of(Op::compare_set, 1, 2), {"key", "", "new"});
  const std::string stream = frame + "next";
  Request parsed;
  std::size_t size = 0;
  CHECK(parse_request(stream, parsed, size) == Parsed::complete);
  CHECK(size == frame.size());
  CHECK(parsed.header.seq == 7 && parsed.keys.size() == 1 && parsed.values.size() == 2);
  CHECK(parsed.keys[0] == "key" && parsed.values[0].empty() && parsed.values[1] == "new");
}

TEST(request_in_pieces_is_incomplete_until_the_last_byte) {
  const std::string frame = request(header_of(Op::set, 1, 1), {"key", "value"});
  for (std::size_t size = 0; size < frame.size(); ++size) {
    CHECK(parse(frame.substr(0, size)) == Parsed::incomplete);
  }
}

TEST(request_out_of_bounds_is_malformed_before_it_is_complete) {
  RequestHeader header = header_of(Op::set, 1, 1);
  header.length = max_request_bytes + 1;
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  CHECK(parse(bytes) == Parsed::malformed);
  CHECK(parse(request(header_of(Op::set, 2, 1), {"a", "b", "c"})) == Parsed::malformed);
  CHECK(parse(request(header_of(Op::wait, max_keys + 1, 0), {})) == Parsed::malformed);
  CHECK(parse(request(header_of(Op::multi_set, 2, 1), {"a", "b", "c"})) == Parsed::malformed);
  CHECK(parse(request(header_of(static_cast<Op>(0), 0, 0), {})) == Parsed::malformed);
  CHECK(parse(request(header_of(static_cast<Op>(99), 0, 0), {})) == Parsed::malformed);
  const std::string long_key(max_key_bytes + 1, 'k');
  CHECK(parse(request(header_of(Op::get, 1, 0), {long_key})) == Parsed::malformed);
  CHECK(parse(request(header_of(Op::get, 1, 0), {"key", "left over"})) == Parsed::malformed);
}

TEST(reply_comes_back_as_it_was_sent) {
  std::string bytes;
  append_reply(bytes, 9, true, {Code::timeout, -3, {"a", std::string("\0\xff", 2)}});
  ReplyHeader header;
  Reply reply;
  CHECK(parse_reply_header(bytes, header) == Parsed::complete);
  CHECK(reply_bytes(header) == bytes.size());
  CHECK(read_reply(bytes, header, reply));
  CHECK(header.seq == 9 && header.counted == 1);
  CHECK(reply.code == Code::timeout && reply.number == -3);
  CHECK(reply.strings.size() == 2 && reply.strings[1] == std::string("\0\xff", 2));
}

// Whatever arrives, the parsers stay inside the bytes they were given (the sanitizers watch).
TEST(random_bytes_never_break_the_parsers) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    std::string bytes(random() % 160, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random() % 4 == 0 ? random() : 0);
    if (bytes.size() > 4) std::memset(bytes.data() + 1, 0, 3);  // plausible lengths
    if (bytes.size() > 5) bytes[4] = static_cast<char>(random() % 20);
    static_cast<void>(parse(bytes));
    ReplyHeader header;
    Reply reply;
    if (parse_reply_header(bytes, header) == Parsed::complete) {
      static_cast<void>(read_reply(bytes, header, reply));
    }
  }
}
