// The formats int8-b64, int8-b32 and mx-e4m3 on the device: the bytes and values of quant::Codec, bit for bit, where the rules are
// written down. Every step is one IEEE operation in the order of the host's code: the intrinsics below are never fused, and NaN, whose
// bits the device chooses otherwise, is put together by hand. A warp works on one block; all parameters are 64-bit words.
//
// Compiled by NVRTC without headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILE 8192u
#define INFINITE 0x7f800000u
#define WARP 32u

static __device__ __forceinline__ float of_bits(u32 bits) { return __uint_as_float(bits); }
static __device__ __forceinline__ u32 bits_of(float v) { return __float_as_uint(v); }

// a + b with the NaN of an x86 processor: that of a, else that of b, made quiet; a new one has its sign set.
static __device__ __forceinline__ float add(float a, float b)
{
    u32 x = bits_of(a), y = bits_of(b);
    if ((x & 0x7fffffffu) > INFINITE) return of_bits(x | 0x00400000u);
    if ((y & 0x7fffffffu) > INFINITE) return of_bits(y | 0x00400000u);
    float sum = __fadd_rn(a, b);
    return (bits_of(sum) & 0x7fffffffu) > INFINITE ? of_bits(0xffc00000u) : sum;
}

// a * b for an a that is a number, likewise.
static __device__ __forceinline__ float mul(float a, float b)
{
    if ((bits_of(b) & 0x7fffffffu) > INFINITE) return of_bits(bits_of(b) | 0x00400000u);
    float product = __fmul_rn(a, b);
    return (bits_of(product) & 0x7fffffffu) > INFINITE ? of_bits(0xffc00000u) : product;
}

static __device__ __forceinline__ u64 splitmix64(u64 seed, u64 index)
{
    u64 z = seed + (index + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

struct Rounding { u64 key; bool stochastic; };

static __device__ __forceinline__ float uniform(u64 key, u64 index)
{
    return __fmul_rn(__ull2float_rn(splitmix64(key, index) >> 40), 1.0f / 16777216.0f);
}

static __device__ __forceinline__ u8 integer(float v, Rounding how, u64 index)
{
    if (!how.stochastic) return (u8)bits_of(__fadd_rn(v, 12582912.0f));
    float down = floorf(v);
    return (u8)((int)down + (uniform(how.key, index) < __fsub_rn(v, down) ? 1 : 0));
}

// The bf16 scale that maps the finite amax to levels.
static __device__ __forceinline__ u32 scale_of(float amax, float levels)
{
    u32 q = bits_of(__fdiv_rn(amax, levels));
    u32 bits = (q + 0x7fffu + (q >> 16 & 1)) >> 16;
    float s = of_bits(bits << 16);
    if (bits < 0x0080u) return 0;
    return bits_of(__fmul_rn(s, levels)) == INFINITE ? bits - 1 : bits;
}

static __device__ __forceinline__ float limited(float v, float limit)
{
    return v < -limit ? -limit : v > limit ? limit : v;
}

// The E4M3 code of a finite magnitude: to nearest even or stochastically, not limited.
static __device__ __forceinline__ u32 e4m3(u32 magnitude, Rounding how, u64 index)
{
    const u32 cut = 20, normal = (128 - 7) << 23;
    if (!how.stochastic) {
        if (magnitude < normal) {
            const u32 unit = (127 + 24 - 7 - 3) << 23;
            return bits_of(__fadd_rn(of_bits(magnitude), of_bits(unit))) - unit;
        }
        u32 odd = magnitude >> cut & 1;
        return ((magnitude + (1u << (cut - 1)) - 1 + odd) >> cut) - ((127 - 7) << 3);
    }
    u32 code;
    float rest;
    if (magnitude >= normal) {
        code = (magnitude >> cut) - ((127 - 7) << 3);
        rest = __fmul_rn(__uint2float_rn(magnitude & ((1u << cut) - 1)), 1.0f / 1048576.0f);
    } else {
        float steps = __fmul_rn(of_bits(magnitude), of_bits((126 + 7 + 3) << 23));
        code = (u32)steps;
        rest = __fsub_rn(steps, floorf(steps));
    }
    return code + (uniform(how.key, index) < rest ? 1 : 0);
}

static __device__ __forceinline__ float e4m3_value(u32 code)
{
    u32 magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
    float v = __fmul_rn(of_bits(magnitude << 20), of_bits((254u - 7) << 23));
    return of_bits((magnitude > 0x7eu ? 0x7fc00000u : bits_of(v)) | sign);
}

static __device__ __forceinline__ u32 warp_max(u32 v)
{
    for (int d = 16; d > 0; d >>= 1) v = max(v, __shfl_xor_sync(0xffffffffu, v, d));
    return v;
}

// Where a block lies: its scale (S bytes) and its first code, and how many values it has.
struct Place { u64 scale, codes; u32 count; };

template <u32 B, u32 S>
static __device__ __forceinline__ Place place(u64 block, u64 count)
{
    const u64 per_tile = TILE / B, whole = TILE + per_tile * S;
    u64 tile = block / per_tile, within = block % per_tile;
    u64 left = count - tile * TILE;
    u32 in_tile = left < TILE ? (u32)left : TILE;
    u64 scales = (u64)((in_tile + B - 1) / B) * S;
    u64 before = within * B;
    Place p;
    p.scale = tile * whole + within * S;
    p.codes = tile * whole + scales + before;
    p.count = in_tile - before < B ? (u32)(in_tile - before) : B;
    return p;
}

#define FOR_EACH_BLOCK(B)                                                                  \
    const u64 blocks = (count + (B) - 1) / (B), warps = (u64)gridDim.x * (blockDim.x / WARP); \
    const u32 lane = threadIdx.x % WARP;                                                   \
    for (u64 block = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP; block < blocks; block += warps)

template <u32 B, bool MX>
static __device__ __forceinline__ void encode(const float* values, u8* out, u64 count, u64 first, Rounding how, u32* non_finite)
{
    const u32 EACH = B / WARP, S = MX ? 1 : 2;
    FOR_EACH_BLOCK(B) {
        const Place p = place<B, S>(block, count);
        float v[EACH];
        u32 peak = 0;
        for (u32 k = 0; k < EACH; k++) {
            u32 i = lane + k * WARP;
            v[k] = i < p.count ? values[block * B + i] : 0.0f;
            peak = max(peak, bits_of(v[k]) & 0x7fffffffu);
        }
        peak = warp_max(peak);
        const bool finite = peak < INFINITE;
        u32 amax = peak;
        if (!finite) {
            amax = 0;
            u32 bad = 0;
            for (u32 k = 0; k < EACH; k++) {
                u32 m = bits_of(v[k]) & 0x7fffffffu;
                bad += m < INFINITE ? 0 : 1;
                amax = max(amax, m < INFINITE ? m : 0);
            }
            amax = warp_max(amax);
            if (bad) atomicAdd(non_finite, bad);
        }
        float inverse, limit = finite ? 127.0f : 126.0f;
        if (MX) {
            u32 code = amax >> 23 > 8 ? (amax >> 23) - 8 : 0;
            inverse = of_bits((254 - code) << 23);
            if (lane == 0) out[p.scale] = (u8)code;
        } else {
            u32 s = scale_of(of_bits(amax), limit);
            inverse = s == 0 ? 0.0f : __fdiv_rn(1.0f, of_bits(s << 16));
            u32 stored = finite ? s : s | 0x8000u;
            if (lane < 2) out[p.scale + lane] = (u8)(stored >> (8 * lane));
        }
        for (u32 k = 0; k < EACH; k++) {
            u32 i = lane + k * WARP;
            if (i >= p.count) continue;
            u32 bits = bits_of(v[k]), m = bits & 0x7fffffffu;
            u64 index = first + block * B + i;
            u8 code;
            if (MX) {
                u32 sign = bits >> 31 << 7;
                if (m >= INFINITE) {
                    code = (u8)(0x7fu | sign);
                } else {
                    u32 c = e4m3(bits_of(__fmul_rn(v[k], inverse)) & 0x7fffffffu, how, index);
                    code = (u8)((c < 0x7eu ? c : 0x7eu) | sign);
                }
            } else if (m > INFINITE) {
                code = (u8)-128;
            } else if (m == INFINITE) {
                code = bits >> 31 ? (u8)-127 : (u8)127;
            } else {
                code = integer(limited(__fmul_rn(v[k], inverse), limit), how, index);
            }
            out[p.codes + i] = code;
        }
    }
}

template <u32 B, bool MX, bool ADD>
static __device__ __forceinline__ void decode(const u8* bytes, float* out, u64 count)
{
    const u32 EACH = B / WARP, S = MX ? 1 : 2;
    FOR_EACH_BLOCK(B) {
        const Place p = place<B, S>(block, count);
        u32 scale = bytes[p.scale];
        if (!MX) scale |= (u32)bytes[p.scale + 1] << 8;
        float s = MX ? (scale == 0 ? of_bits(0x00400000u) : scale == 255 ? of_bits(0x7fc00000u) : of_bits(scale << 23))
                     : of_bits((scale & 0x7fffu) << 16);
        for (u32 k = 0; k < EACH; k++) {
            u32 i = lane + k * WARP;
            if (i >= p.count) continue;
            u32 code = bytes[p.codes + i];
            float v;
            if (MX) {
                float e = e4m3_value(code);
                u32 nan = bits_of(e);
                // As above: the NaN of the first operand, else that of the second.
                v = (nan & 0x7fffffffu) > INFINITE ? e : scale == 255 ? s : __fmul_rn(e, s);
            } else {
                float c = (float)(signed char)code;
                v = !(scale & 0x8000u) || (code != 127 && code != 129 && code != 128) ? mul(c, s)
                    : code == 127                                                     ? of_bits(INFINITE)
                    : code == 129                                                     ? of_bits(0xff800000u)
                                                                                      : of_bits(0x7fc00000u);
            }
            float* to = out + block * B + i;
            *to = ADD ? add(*to, v) : v;
        }
    }
}

#define FORMAT(NAME, B, MX)                                                                                          \
    extern "C" __global__ void ox_encode_##NAME(u64 values, u64 out, u64 count, u64 first, u64 key, u64 stochastic, u64 non_finite) \
    {                                                                                                                \
        Rounding how = {key, stochastic != 0};                                                                       \
        encode<B, MX>((const float*)values, (u8*)out, count, first, how, (u32*)non_finite);                          \
    }                                                                                                                \
    extern "C" __global__ void ox_decode_##NAME(u64 bytes, u64 out, u64 count)                                       \
    {                                                                                                                \
        decode<B, MX, false>((const u8*)bytes, (float*)out, count);                                                  \
    }                                                                                                                \
    extern "C" __global__ void ox_decode_add_##NAME(u64 bytes, u64 out, u64 count)                                   \
    {                                                                                                                \
        decode<B, MX, true>((const u8*)bytes, (float*)out, count);                                                   \
    }

FORMAT(int8_b64, 64, false)
FORMAT(int8_b32, 32, false)
FORMAT(mx_e4m3, 32, true)

#define FOR_EACH(i)                                                                                     \
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)

// values[i] /= divisor, whose bits are the last word.
extern "C" __global__ void ox_divide(u64 values, u64 count, u64 divisor)
{
    float* v = (float*)values;
    FOR_EACH(i) {
        u32 bits = bits_of(v[i]);
        v[i] = (bits & 0x7fffffffu) > INFINITE ? of_bits(bits | 0x00400000u) : __fdiv_rn(v[i], of_bits((u32)divisor));
    }
}

extern "C" __global__ void ox_widen_f16(u64 from, u64 to, u64 count)
{
    FOR_EACH(i) {
        u16 h = ((const u16*)from)[i];
        float v;
        asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
        u32 nan = (u32)(h & 0x8000u) << 16 | 0x7fc00000u | (u32)(h & 0x3ffu) << 13;
        ((float*)to)[i] = (h & 0x7fffu) > 0x7c00u ? of_bits(nan) : v;
    }
}

extern "C" __global__ void ox_widen_bf16(u64 from, u64 to, u64 count)
{
    FOR_EACH(i) {
        u32 bits = (u32)((const u16*)from)[i] << 16;
        ((float*)to)[i] = of_bits((bits & 0x7fffffffu) > INFINITE ? bits | 0x00400000u : bits);
    }
}

extern "C" __global__ void ox_narrow_f16(u64 from, u64 to, u64 count)
{
    FOR_EACH(i) {
        float v = ((const float*)from)[i];
        u32 bits = bits_of(v);
        u16 h;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
        u16 nan = (u16)((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
        ((u16*)to)[i] = (bits & 0x7fffffffu) > INFINITE ? nan : h;
    }
}

extern "C" __global__ void ox_narrow_bf16(u64 from, u64 to, u64 count)
{
    FOR_EACH(i) {
        u32 bits = bits_of(((const float*)from)[i]);
        u32 rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        ((u16*)to)[i] = (u16)((bits & 0x7fffffffu) > INFINITE ? bits >> 16 | 0x40u : rounded);
    }
}
