// bfloat16 on the host: the upper half of an f32, rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 b) {
    const uint32_t bits = static_cast<uint32_t>(b.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline __nv_bfloat16 __float2bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return __nv_bfloat16{0x7FFF};
    bits += 0x7FFFu + (bits >> 16 & 1u);
    return __nv_bfloat16{static_cast<uint16_t>(bits >> 16)};
}
