// Published vectors: FIPS 180-4 examples and RFC 4231.
#include <string>

#include "store/sha256.h"
#include "tests/check.h"

using gradsync::store::Digest;
using gradsync::store::equal_in_constant_time;
using gradsync::store::hmac_sha256;
using gradsync::store::Sha256;
using gradsync::store::sha256;

namespace {

std::string hex(const Digest& digest) {
  static const char* const digits = "0123456789abcdef";
  std::string text;
  for (const auto byte : digest) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

}  // namespace

TEST(hash_of_short_and_long_messages) {
  CHECK(hex(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256(std::string(1000000, 'a'))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(hash_does_not_depend_on_the_pieces) {
  const std::string text(200, 'x');
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    Sha256 pieces;
    pieces.update(std::string_view(text).substr(0, cut));
    pieces.update(std::string_view(text).substr(cut));
    CHECK(pieces.finish() == sha256(text));
  }
}

TEST(hmac_of_short_and_long_keys) {
  CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(std::string(131, '\xaa'),
                        "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(comparison_sees_every_byte) {
  const Digest a = sha256("a");
  for (std::size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    b[i] ^= 1;
    CHECK(!equal_in_constant_time(a.data(), b.data(), a.size()));
  }
  CHECK(equal_in_constant_time(a.data(), a.data(), a.size()));
}
