// What NVRTC lacks: it compiles without headers, so what the kernels use of them is declared here.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#define INFINITY __int_as_float(0x7f800000)

struct __half {
    unsigned short bits;
};
struct __nv_bfloat16 {
    unsigned short bits;
};
__device__ inline float __half2float(__half x) {
    float z;
    asm("cvt.f32.f16 %0, %1;" : "=f"(z) : "h"(x.bits));
    return z;
}
__device__ inline __half __float2half(float x) {
    __half z;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(z.bits) : "f"(x));
    return z;
}
__device__ inline float __bfloat162float(__nv_bfloat16 x) {
    return __int_as_float(static_cast<int>(static_cast<unsigned>(x.bits) << 16));
}
__device__ inline __nv_bfloat16 __float2bfloat16(float x) {
    __nv_bfloat16 z;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(z.bits) : "f"(x));
    return z;
}
#endif
