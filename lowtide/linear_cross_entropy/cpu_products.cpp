// Products of bfloat16 numbers with float32 sums, on a CPU that has units for them (cpu_products.py).
//
//     C  rows of tokens                 x  [C, D]  the tokens, bfloat16, each row's features side by side
//     D  features                       w  [V, D]  the classes' weights, bfloat16
//     V  classes                        e  [C, V]  exponentials (or their derivatives), bfloat16
//
// The products are oneDNN's, by the function of torch's that its compiler's code calls (brgemm): m rows of a
// times k rows of b, b in pairs, [k / 2][n][2], which is how the units want it. It uses AMX where that is. Both
// operands are copied into buffers that stay in the second cache: rows a power of two apart would all fall into
// the same few places of it, an odd k gets a zero beside it, and brgemm, which makes a kernel for each new
// shape and stride, meets few of them.
//
// No sum depends on how many threads there are: an element's addends come in the same order whoever adds them.

#include <immintrin.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <omp.h>
#include <vector>

namespace {

using bf16 = uint16_t;
using brgemm_function = void (*)(int64_t m, int64_t n, int64_t k, int64_t a_stride, int64_t b_stride,
                                 int64_t c_stride, bool add, const void* a, const void* b, float* c, bool pairs);
brgemm_function brgemm;
void (*brgemm_release)(bool pairs);

constexpr int64_t ROWS = 32;       // of a in one product: its sums and operands leave the first cache last
constexpr int64_t DEPTH = 512;     // k of one product: long enough that reading the sums again does not count
constexpr int64_t CLASSES = 128;   // classes of a tile of logits
constexpr int64_t GROUP = 512;     // rows whose logits wait for their other features, where D is above DEPTH
constexpr int64_t SEGMENTS = 64;   // runs of classes, each added up by itself, whoever takes it
constexpr int64_t COLUMNS = 256;   // of a sum, at most, that one thread makes at a time (multiply)
constexpr int64_t SHARED = 1 << 18;  // numbers of x in pairs, at most, while 64 columns need no more
constexpr int64_t TURNED = 64;     // classes whose exponentials are turned around at a time

int64_t up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

struct Freed {
    void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Buffer = std::unique_ptr<T[], Freed>;

template <class T>
Buffer<T> buffer(int64_t size) {
    void* memory = std::aligned_alloc(64, up(size * sizeof(T), 64));
    if (!memory) throw std::bad_alloc();
    return Buffer<T>(static_cast<T*>(memory));
}

// Every task once, by whichever thread is free. make_worker() is called in each thread, for its buffers. Returns
// 0, or 1 where a thread could not go on: no exception leaves a parallel region.
template <class MakeWorker>
int each_task(int threads, int64_t tasks, const MakeWorker& make_worker) {
    std::atomic<int64_t> next{0};
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min<int64_t>(threads, tasks))))
    {
        try {
            auto work = make_worker();
            for (int64_t task; !failed && (task = next++) < tasks;) work(task);
            brgemm_release(true);  // or AMX stays set up, and the next user of the thread's registers pays
        } catch (...) {
            failed = 1;
        }
    }
    return failed;
}

__mmask16 first(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }
__mmask32 first32(int64_t count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

// 16 columns of two rows, side by side in pairs; zeros for columns that are not there, or a row that is not.
__m512i pairs(const bf16* row, int64_t stride, bool second, __mmask16 columns) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, row));
    if (!second) return low;
    __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, row + stride));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 16 rows of 16 pairs become 16 columns.
void transpose(__m512i r[16]) {
    __m512i s[16];
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {  // r[4 j + i]: column 4 q + i of rows 4 j to 4 j + 3, for each quarter q
        __m512i even_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        __m512i odd_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        __m512i even_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        __m512i odd_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        s[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        s[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        s[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    std::memcpy(r, s, sizeof s);
}

// k rows of n columns in pairs of rows, [depth / 2][stride][2]; rows from k to depth are zeros.
void pack_rows(int64_t k, int64_t depth, int64_t n, const bf16* from, int64_t from_stride, bf16* to, int64_t stride) {
    for (int64_t i = 0; i < depth; i += 2)
        for (int64_t j = 0; j < n; j += 16)
            _mm512_storeu_si512(to + i * stride + 2 * j, i < k ? pairs(from + i * from_stride + j, from_stride,
                                i + 1 < k, first(n - j)) : _mm512_setzero_si512());
}

// n rows of k features in pairs of features, [k / 2][CLASSES][2].
void pack_features(int64_t n, int64_t k, const bf16* from, int64_t from_stride, bf16* to) {
    __m512i r[16];
    for (int64_t j = 0; j < n; j += 16)
        for (int64_t i = 0; i < k; i += 32) {
            for (int64_t row = 0; row < 16; row++)
                r[row] = j + row < n ? _mm512_maskz_loadu_epi16(first32(k - i), from + (j + row) * from_stride + i)
                                     : _mm512_setzero_si512();
            transpose(r);
            for (int64_t pair = 0; pair < 16 && i + 2 * pair < k; pair++)
                _mm512_store_si512(to + (i + 2 * pair) * CLASSES + 2 * j, r[pair]);
        }
}

// n columns of k rows become n rows of up(k, 32); numbers from k on are zeros.
void turn(int64_t k, int64_t n, const bf16* from, int64_t from_stride, bf16* to) {
    __m512i r[16];
    for (int64_t i = 0; i < k; i += 32)
        for (int64_t j = 0; j < n; j += 16) {
            for (int64_t pair = 0, row = i; pair < 16; pair++, row += 2)
                r[pair] = row < k ? pairs(from + row * from_stride + j, from_stride, row + 1 < k, first(n - j))
                                  : _mm512_setzero_si512();
            transpose(r);
            for (int64_t column = 0; column < 16 && j + column < n; column++)
                _mm512_store_si512(to + (j + column) * up(k, 32) + i, r[column]);
        }
}

// c [m, n] (+)= a [m, k] b, b in pairs. strip holds ROWS x DEPTH.
void product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride,
             float* c, int64_t c_stride, bool add, bf16* strip) {
    for (int64_t row = 0; row < m; row++) {
        std::memcpy(strip + row * DEPTH, a + row * a_stride, k * sizeof(bf16));
        if (k % 2) strip[row * DEPTH + k] = 0;
    }
    brgemm(m, n, up(k, 2), DEPTH, b_stride, c_stride, add, strip, b, c, true);
}

// Within 2 units of the last digit; 0 and inf beyond float32's range, NaN of NaN.
__m512 exp(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(90), x);  // the second where one is NaN
    x = _mm512_max_ps(_mm512_set1_ps(-110), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);  // ln 2 in two parts, n times the first exact
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.428606765330187e-6f), x);
    __m512 p = _mm512_set1_ps(1.f / 5040);
    for (float each : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f})
        p = _mm512_fmadd_ps(p, x, _mm512_set1_ps(each));
    return _mm512_scalef_ps(p, n);
}

// What a row of a tile of logits becomes: n exponentials, added to sum; target is its column here, if it is.
void exponentials_of(int64_t n, const float* u, float scale, const float* bias, float reference, int64_t target,
                     bf16* e, float& sum, float& largest) {
    const __m512 c = _mm512_set1_ps(scale), r = _mm512_set1_ps(reference);
    __m512 sums = _mm512_setzero_ps(), maxima = _mm512_set1_ps(-INFINITY);
    for (int64_t j = 0; j < n; j += 32) {
        __m512 half[2];
        for (int64_t h = 0; h < 2; h++) {
            const int64_t i = j + 16 * h;
            const __mmask16 here = first(n - i);
            const __mmask16 others = target >= i && target < i + 16 ? here & ~(1u << (target - i)) : here;
            __m512 z = _mm512_mul_ps(c, _mm512_loadu_ps(u + i));
            if (bias) z = _mm512_add_ps(z, _mm512_maskz_loadu_ps(here, bias + i));
            maxima = _mm512_mask_max_ps(maxima, others, maxima, z);
            half[h] = _mm512_maskz_mov_ps(others, exp(_mm512_sub_ps(z, r)));
            sums = _mm512_add_ps(sums, half[h]);
        }
        if (e) _mm512_mask_storeu_epi16(e + j, first32(n - j), (__m512i)_mm512_cvtne2ps_pbh(half[1], half[0]));
    }
    sum += _mm512_reduce_add_ps(sums);
    largest = std::max(largest, _mm512_reduce_max_ps(maxima));
}

}  // namespace

// Where torch's functions are. Not 0 where they refuse a product, or do not make the one that is meant: 1 2 + 3 4.
extern "C" int lowtide_use(brgemm_function product_of, void (*release)(bool)) try {
    brgemm = product_of;
    brgemm_release = release;
    alignas(64) const bf16 a[2] = {0x3f80, 0x4040}, b[2] = {0x4000, 0x4080};
    float c = -1;
    brgemm(1, 1, 2, 2, 1, 1, false, a, b, &c, true);
    brgemm_release(true);
    return c != 14;
} catch (...) {
    return 1;
}

// e_ij = exp(scale x_i w_j + bias_j - reference_i), and 0 where j is target_i; sum_i of them before they are
// rounded, max_i the largest logit but the target's. bias may be null, and so may e.
extern "C" int lowtide_exponentials(int64_t C, int64_t D, int64_t V, const bf16* x, int64_t x_stride, const bf16* w,
                                    int64_t w_stride, float scale, const float* bias, const float* reference,
                                    const int64_t* target, bf16* e, int64_t e_stride, float* sum, float* largest,
                                    int threads) try {
    const int64_t blocks = (V + CLASSES - 1) / CLASSES, segments = std::min(SEGMENTS, blocks);
    const int64_t groups = (C + GROUP - 1) / GROUP, held = D > DEPTH ? std::min(C, GROUP) : std::min(C, ROWS);
    std::vector<float> sums(segments * C, 0.f), maxima(segments * C, -INFINITY);
    const int failed = each_task(threads, segments * groups, [&] {
        return [&, packed = buffer<bf16>(up(std::min(D, DEPTH), 2) * CLASSES), strip = buffer<bf16>(ROWS * DEPTH),
                u = buffer<float>(held * CLASSES)](int64_t task) {
            const int64_t segment = task / groups, start = task % groups * GROUP, stop = std::min(C, start + GROUP);
            for (int64_t block = segment * blocks / segments; block < (segment + 1) * blocks / segments; block++) {
                const int64_t j = block * CLASSES, n = std::min(CLASSES, V - j);
                for (int64_t d = 0; d < D; d += DEPTH) {
                    const int64_t k = std::min(DEPTH, D - d);
                    pack_features(n, k, w + j * w_stride + d, w_stride, packed.get());
                    for (int64_t i = start; i < stop; i += ROWS) {
                        const int64_t m = std::min(ROWS, stop - i);
                        float* logits = u.get() + (D > DEPTH ? i - start : 0) * CLASSES;
                        product(m, n, k, x + i * x_stride + d, x_stride, packed.get(), CLASSES, logits, CLASSES,
                                d > 0, strip.get());
                        if (d + DEPTH < D) continue;
                        for (int64_t row = i; row < i + m; row++)
                            exponentials_of(n, logits + (row - i) * CLASSES, scale, bias ? bias + j : nullptr,
                                            reference[row], target[row] - j, e ? e + row * e_stride + j : nullptr,
                                            sums[segment * C + row], maxima[segment * C + row]);
                    }
                }
            }
        };
    });
    for (int64_t row = 0; row < C; row++) {
        sum[row] = 0;
        largest[row] = -INFINITY;
        for (int64_t segment = 0; segment < segments; segment++) {
            sum[row] += sums[segment * C + row];
            largest[row] = std::max(largest[row], maxima[segment * C + row]);
        }
    }
    return failed;
} catch (...) {
    return 1;
}

// out [C, D] (+)= e w
extern "C" int lowtide_multiply(int64_t C, int64_t D, int64_t V, const bf16* e, int64_t e_stride, const bf16* w,
                                int64_t w_stride, float* out, int64_t out_stride, bool add, int threads) {
    // As many columns for one thread as for another; rows are divided as well where columns do not go round.
    const int64_t wanted = up((D + COLUMNS - 1) / COLUMNS, threads);
    const int64_t width = std::max<int64_t>(64, up((D + wanted - 1) / wanted, 16)), groups = (D + width - 1) / width;
    const int64_t parts = std::max<int64_t>(1, threads / groups), height = up((C + parts - 1) / parts, ROWS);
    return each_task(threads, groups * ((C + height - 1) / height), [&] {
        return [&, packed = buffer<bf16>(DEPTH * width), strip = buffer<bf16>(ROWS * DEPTH)](int64_t task) {
            const int64_t d = task % groups * width, n = std::min(width, D - d), start = task / groups * height;
            for (int64_t j = 0; j < V; j += DEPTH) {
                const int64_t k = std::min(DEPTH, V - j);
                pack_rows(k, up(k, 2), n, w + j * w_stride + d, w_stride, packed.get(), width);
                for (int64_t i = start; i < std::min(C, start + height); i += ROWS)
                    product(std::min({ROWS, start + height - i, C - i}), n, k, e + i * e_stride + j, e_stride,
                            packed.get(), width, out + i * out_stride + d, out_stride, add || j > 0, strip.get());
            }
        };
    });
}

// out [V, D] (+)= e^T x
extern "C" int lowtide_multiply_transposed(int64_t C, int64_t D, int64_t V, const bf16* e, int64_t e_stride,
                                           const bf16* x, int64_t x_stride, float* out, int64_t out_stride, bool add,
                                           int threads) try {
    // Few lengths of a product, whatever C is, as each has a kernel of its own.
    const int64_t depth = up(C, 8), stride = up(C, 32);
    const int64_t width = std::min(up(D, 16), std::max<int64_t>(64, SHARED / depth / 64 * 64));
    const auto packed = buffer<bf16>(depth * width);
    for (int64_t d = 0; d < D; d += width) {
        const int64_t columns = std::min(width, D - d);
        const int64_t rows = up((depth + threads - 1) / threads, 2);
        int failed = each_task(threads, (depth + rows - 1) / rows, [&] {
            return [&](int64_t task) {
                const int64_t i = task * rows;
                pack_rows(C - i, std::min(rows, depth - i), columns, x + i * x_stride + d, x_stride,
                          packed.get() + i * width, width);
            };
        });
        failed |= each_task(threads, (V + TURNED - 1) / TURNED, [&] {
            return [&, turned = buffer<bf16>(TURNED * stride)](int64_t task) {
                const int64_t j = task * TURNED, n = std::min(TURNED, V - j);
                turn(C, n, e + j, e_stride, turned.get());
                for (int64_t i = 0; i < n; i += ROWS)
                    brgemm(std::min(ROWS, n - i), columns, depth, stride, width, out_stride, add,
                           turned.get() + i * stride, packed.get(), out + (j + i) * out_stride + d, true);
            };
        });
        if (failed) return failed;
    }
    return 0;
} catch (...) {
    return 1;
}
