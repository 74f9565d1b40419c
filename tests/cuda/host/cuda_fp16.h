// IEEE half precision on the host: stored as bits, converted in software, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct __half {
    uint16_t bits;
};

inline float __half2float(__half h) {
    const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
    const uint32_t exponent = h.bits >> 10 & 0x1Fu, fraction = h.bits & 0x3FFu;
    float out;
    if (exponent == 0) {
        out = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -out : out;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline __half __float2half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    uint32_t out;
    if (magnitude > 0x7F800000u) {
        out = 0x7E00u;
    } else if (magnitude >= 0x477FF000u) {
        out = 0x7C00u;  // 65520 and above round to infinity
    } else if (magnitude < 0x38800000u) {
        // Subnormal: adding 0.5 leaves the rounded fraction in the low bits.
        float small;
        std::memcpy(&small, &magnitude, sizeof small);
        small += 0.5f;
        std::memcpy(&out, &small, sizeof out);
        out -= 0x3F000000u;
    } else {
        const uint32_t odd = magnitude >> 13 & 1u;
        out = (magnitude - 0x38000000u + 0xFFFu + odd) >> 13;
    }
    return __half{static_cast<uint16_t>(sign | out)};
}
