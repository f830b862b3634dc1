// Multiply bfloat16 matrices with float32 accumulators, on a CPU that has units for them (see
// gemm.py).
//
//     C  rows (tokens)                  x  [C, D]  the tokens, bfloat16, each row contiguous
//     D  features                       w  [V, D]  the weights of the classes, bfloat16
//     V  classes                        e  [C, V]  exponentials, bfloat16
//
// The GEMMs are oneDNN's. They are called through torch's function brgemm, which torch's compiler
// also uses. brgemm computes c [m, n] = a [m, k] b [k, n]. The units require that b is stored in
// pairs of rows, [k / 2][n][2]. brgemm uses AMX if the processor has it.
//
// Both operands are copied into buffers that stay in the second-level cache, for three reasons.
// Rows a power of two apart would all fall into a few sets of that cache. If k is odd, the last row
// needs a row of zeros beside it. And brgemm generates a kernel for each new shape and stride; with
// the buffers there are few.
//
// No sum depends on the number of threads: each element's terms are added in the same order,
// whichever thread adds them.

#include <immintrin.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

using bf16 = uint16_t;
using size = int64_t;
using brgemm_function = void (*)(size m, size n, size k, size a_stride, size b_stride, size c_stride,
                                 bool add, const void* a, const void* b, float* c, bool b_in_pairs);
brgemm_function brgemm;
void (*brgemm_release)(bool b_in_pairs);

constexpr size ROWS = 32;         // rows of a in one call of brgemm
constexpr size DEPTH = 512;       // k of one call; each further call reads and writes c again
constexpr size CLASSES = 128;     // classes in a tile of logits
constexpr size GROUP = 512;       // rows whose unfinished logits are held if D > DEPTH
constexpr size SEGMENTS = 64;     // runs of classes; each is summed by tasks of its own
constexpr size COLUMNS = 256;     // most columns of a task of lowtide_multiply
constexpr size SHARED = 1 << 19;  // most elements of x packed at a time, but at least 64 columns
constexpr size TURNED = 64;       // classes whose exponentials are transposed at a time

size parts_of(size count, size each) { return (count + each - 1) / each; }
size up(size count, size multiple) { return parts_of(count, multiple) * multiple; }

template <class T>
struct Matrix {
    T* start;
    size stride;  // from row to row, in elements; each row is contiguous
    T* at(size row, size column) const { return start + row * stride + column; }
    Matrix from(size row, size column) const { return {at(row, column), stride}; }
};

template <class T>
struct Buffer {
    std::unique_ptr<__m512i[]> lines;
    explicit Buffer(size count) : lines(new __m512i[parts_of(count * sizeof(T), sizeof(__m512i))]) {}
    T* get() const { return reinterpret_cast<T*>(lines.get()); }
};

// Run every task once, on any thread that is free. Each thread calls make_worker() once, which
// allocates the thread's buffers. Return 0, or 1 if a thread threw an exception, because no
// exception may leave a parallel region.
template <class MakeWorker>
int each_task(int threads, size tasks, const MakeWorker& make_worker) {
    std::atomic<size> next{0};
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(std::max<size>(1, std::min<size>(threads, tasks))))
    try {
        auto work = make_worker();
        for (size task; !failed && (task = next++) < tasks;) work(task);
        brgemm_release(true);  // otherwise AMX stays configured and slows down other code
    } catch (...) {
        failed = 1;
    }
    return failed;
}

__mmask32 first32(size count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }
__mmask16 first16(size count) { return first32(std::min<size>(count, 16)); }

// Return columns j to j + 15 of rows i and i + 1 as pairs. There are k rows and n columns; elements
// beyond them are zeros. A load from unmapped memory is slow even if its mask is empty, so the row
// that is loaded always exists.
__m512i pairs(Matrix<const bf16> from, size i, size j, size k, size n) {
    const __mmask16 upper = i < k ? first16(n - j) : 0, lower = i + 1 < k ? upper : 0;
    const __m256i even = _mm256_maskz_loadu_epi16(upper, from.at(std::min(i, k - 1), j));
    const __m256i odd = _mm256_maskz_loadu_epi16(lower, from.at(std::min(i + 1, k - 1), j));
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// Transpose 16 rows of 16 pairs. Exchange two quarters of each square of 2, then of 4, 8 and 16.
void transpose(__m512i r[16]) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int half = 1; half < 16; half *= 2) {
        const __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(half));
        const __m512i there = _mm512_add_epi32(lane, _mm512_set1_epi32(half));
        const __m512i left = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(16 - half));
        const __m512i right = _mm512_mask_add_epi32(there, odd, lane, _mm512_set1_epi32(16));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i & half) continue;
            const __m512i upper = r[i];
            r[i] = _mm512_permutex2var_epi32(upper, left, r[i + half]);
            r[i + half] = _mm512_permutex2var_epi32(upper, right, r[i + half]);
        }
    }
}

// Store k rows of n columns as pairs of rows, [depth / 2][stride][2]. Rows from k to depth become
// zeros.
void pack_rows(size k, size depth, size n, Matrix<const bf16> from, bf16* to, size stride) {
    for (size i = 0; i < depth; i += 2)
        for (size j = 0; j < n; j += 16)
            _mm512_storeu_si512(to + i * stride + 2 * j, pairs(from, i, j, k, n));
}

// Store n rows of k features as pairs of features, [k / 2][stride][2].
void pack_features(size n, size k, Matrix<const bf16> from, bf16* to, size stride) {
    __m512i r[16];
    for (size j = 0; j < n; j += 16)
        for (size i = 0; i < k; i += 32) {
            for (size row = 0; row < 16; row++) {
                const bf16* place = from.at(std::min(j + row, n - 1), i);
                r[row] = _mm512_maskz_loadu_epi16(j + row < n ? first32(k - i) : 0, place);
            }
            transpose(r);
            for (size pair = 0; pair < 16 && i + 2 * pair < k; pair++)
                _mm512_store_si512(to + (i + 2 * pair) * stride + 2 * j, r[pair]);
        }
}

// Transpose k rows of n columns into n rows of up(k, 32) elements. Elements from k on become zeros.
void turn(size k, size n, Matrix<const bf16> from, bf16* to) {
    __m512i r[16];
    for (size i = 0; i < k; i += 32)
        for (size j = 0; j < n; j += 16) {
            for (size pair = 0; pair < 16; pair++) r[pair] = pairs(from, i + 2 * pair, j, k, n);
            transpose(r);
            for (size column = 0; column < 16 && j + column < n; column++)
                _mm512_store_si512(to + (j + column) * up(k, 32) + i, r[column]);
        }
}

// Write a [m, k] b to c [m, n], or add it if add. b is stored in pairs of rows. strip is a buffer
// of ROWS x DEPTH elements for the rows of a.
void product(size m, size n, size k, Matrix<const bf16> a, const bf16* b, size b_stride, Matrix<float> c,
             bool add, bf16* strip) {
    for (size row = 0; row < m; row++) {
        std::memcpy(strip + row * DEPTH, a.at(row, 0), k * sizeof(bf16));
        if (k % 2) strip[row * DEPTH + k] = 0;
    }
    brgemm(m, n, up(k, 2), DEPTH, b_stride, c.stride, add, strip, b, c.start, true);
}

// Return exp(x) within 2 units in the last place. Return 0 or inf beyond float32's range, and NaN
// for NaN.
__m512 exp(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(90), x);  // returns its second operand if one is NaN
    x = _mm512_max_ps(_mm512_set1_ps(-110), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    // Subtract n ln 2 in two parts; n times the first part is exact.
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.428606765330187e-6f), x);
    __m512 p = _mm512_set1_ps(1.f / 5040);
    for (float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f})
        p = _mm512_fmadd_ps(p, x, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(p, n);
}

// Return exp(x) - 1 of x >= 0 within 3 units in the last place. Return about 1.6e38 beyond 88, and
// NaN for NaN.
__m512 expm1(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88), x);  // returns its second operand if one is NaN
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
    x = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.428606765330187e-6f), x);
    __m512 p = _mm512_set1_ps(1.f / 5040), power = _mm512_scalef_ps(_mm512_set1_ps(1), n);
    for (float factor : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f})
        p = _mm512_fmadd_ps(p, x, _mm512_set1_ps(factor));
    return _mm512_fmadd_ps(_mm512_mul_ps(p, x), power, _mm512_sub_ps(power, _mm512_set1_ps(1)));
}

// Replace z by cap tanh(z / cap), and return the derivative of this, 1 - tanh(z / cap)^2, which is at
// least about 1e-38.
__m512 capped(__m512& z, float cap) {
    const __m512 two = _mm512_set1_ps(2), x = _mm512_abs_ps(_mm512_div_ps(z, _mm512_set1_ps(cap)));
    const __m512 power = expm1(_mm512_mul_ps(two, x));
    const __m512 room = _mm512_div_ps(two, _mm512_add_ps(power, two));  // 1 - |tanh|
    const __m512 size = _mm512_mul_ps(_mm512_mul_ps(power, room), _mm512_set1_ps(cap / 2));
    const __mmask16 negative = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_LT_OQ);
    z = _mm512_mask_sub_ps(size, negative, _mm512_setzero_ps(), size);
    return _mm512_mul_ps(room, _mm512_sub_ps(two, room));
}

// Compute n logits of a row from the products u, with a soft cap if cap is not 0. Store their
// exponentials in e if it is not null, times the derivative of the cap. Add the exponentials to sum,
// and raise largest to the largest logit. target is the target's column; if it is inside this tile,
// its exponential is 0, and largest leaves it out.
void exponentials_of(size n, const float* u, float scale, const float* bias, float cap, float reference,
                     size target, bf16* e, float& sum, float& largest) {
    __m512 sums = _mm512_setzero_ps(), maxima = _mm512_set1_ps(-INFINITY);
    for (size j = 0; j < n; j += 32) {
        __m512 half[2];
        for (size h = 0; h < 2; h++) {
            const size i = j + 16 * h;
            const __mmask16 here = first16(n - i);
            const __mmask16 others = target >= i && target < i + 16 ? here & ~(1u << (target - i)) : here;
            __m512 z = _mm512_mul_ps(_mm512_set1_ps(scale), _mm512_loadu_ps(u + i));
            if (bias) z = _mm512_add_ps(z, _mm512_maskz_loadu_ps(here, bias + i));
            const __m512 slope = cap ? capped(z, cap) : z;
            maxima = _mm512_mask_max_ps(maxima, others, maxima, z);
            half[h] = _mm512_maskz_mov_ps(others, exp(_mm512_sub_ps(z, _mm512_set1_ps(reference))));
            sums = _mm512_add_ps(sums, half[h]);
            if (cap) half[h] = _mm512_maskz_mul_ps(others, half[h], slope);
        }
        const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(half[1], half[0]);
        if (e) _mm512_mask_storeu_epi16(e + j, first32(n - j), rounded);
    }
    sum += _mm512_reduce_add_ps(sums);
    largest = std::max(largest, _mm512_reduce_max_ps(maxima));
}

}  // namespace

// Set torch's functions. Return 0 if brgemm computes 1 * 2 + 3 * 4 correctly, else 1.
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

// Compute e_ij = exp(z_ij - reference_i), and e_ij = 0 if j is target_i, where z_ij = scale x_i w_j +
// bias_j. If cap is not 0, z_ij is cap tanh(z_ij / cap) instead, and e_ij is stored times the
// derivative of that. sum_i is the sum over j of exp(z_ij - reference_i) without the target's, and
// largest_i the row's largest logit other than the target's. bias and e may be null. If by_columns, w
// is stored as [D, V].
extern "C" int lowtide_exponentials(size C, size D, size V, Matrix<const bf16> x, Matrix<const bf16> w,
                                    bool by_columns, float scale, const float* bias, float cap,
                                    const float* reference, const int64_t* target, Matrix<bf16> e,
                                    float* sum, float* largest, int threads) try {
    const size blocks = parts_of(V, CLASSES), groups = parts_of(C, GROUP), waiting = D > DEPTH ? GROUP : ROWS;
    // Keep the number of tasks about the same for every C, and with it the number of partial sums.
    const size segments = std::min(std::max<size>(SEGMENTS / groups, 1), blocks);
    std::vector<float> sums(segments * C, 0.f), maxima(segments * C, -INFINITY);
    const int failed = each_task(threads, segments * groups, [&] {
        return [&, packed = Buffer<bf16>(up(std::min(D, DEPTH), 2) * CLASSES),
                strip = Buffer<bf16>(ROWS * DEPTH),
                u = Buffer<float>(std::min(C, waiting) * CLASSES)](size task) {
            const size segment = task / groups, start = task % groups * GROUP;
            const size stop = std::min(C, start + GROUP), end = (segment + 1) * blocks / segments * CLASSES;
            for (size j = segment * blocks / segments * CLASSES; j < std::min(V, end); j += CLASSES) {
                const size n = std::min(CLASSES, V - j);
                for (size d = 0; d < D; d += DEPTH) {
                    const size k = std::min(DEPTH, D - d);
                    if (by_columns)
                        pack_rows(k, up(k, 2), n, w.from(d, j), packed.get(), CLASSES);
                    else
                        pack_features(n, k, w.from(j, d), packed.get(), CLASSES);
                    for (size i = start; i < stop; i += ROWS) {
                        const size m = std::min(ROWS, stop - i);
                        const Matrix<float> logits{u.get() + (i - start) % waiting * CLASSES, CLASSES};
                        product(m, n, k, x.from(i, d), packed.get(), CLASSES, logits, d > 0, strip.get());
                        for (size row = i, at = segment * C + i; d + k == D && row < i + m; row++, at++)
                            exponentials_of(n, logits.at(row - i, 0), scale, bias ? bias + j : nullptr, cap,
                                            reference[row], target[row] - j, e.start ? e.at(row, j) : nullptr,
                                            sums[at], maxima[at]);
                    }
                }
            }
        };
    });
    for (size at = 0; at < segments * C; at++) {
        sum[at % C] = (at < C ? 0 : sum[at % C]) + sums[at];
        largest[at % C] = std::max(at < C ? -INFINITY : largest[at % C], maxima[at]);
    }
    return failed;
} catch (...) {
    return 1;
}

// Write e w to out [C, D], or add it if add. If by_columns, w is stored as [D, V].
extern "C" int lowtide_multiply(size C, size D, size V, Matrix<const bf16> e, Matrix<const bf16> w,
                                bool by_columns, Matrix<float> out, bool add, int threads) {
    // Give all threads the same number of columns. If there are too few columns for this, divide
    // the rows too.
    const size columns = parts_of(D, up(parts_of(D, COLUMNS), threads));
    const size width = std::max<size>(64, up(columns, 16));
    const size groups = parts_of(D, width);
    const size height = up(parts_of(C, std::max<size>(1, threads / groups)), ROWS);
    return each_task(threads, groups * parts_of(C, height), [&] {
        return [&, packed = Buffer<bf16>(DEPTH * width), strip = Buffer<bf16>(ROWS * DEPTH)](size task) {
            const size d = task % groups * width, n = std::min(width, D - d);
            const size start = task / groups * height, stop = std::min(C, start + height);
            for (size j = 0; j < V; j += DEPTH) {
                const size k = std::min(DEPTH, V - j);
                if (by_columns)
                    pack_features(n, k, w.from(d, j), packed.get(), width);
                else
                    pack_rows(k, up(k, 2), n, w.from(j, d), packed.get(), width);
                for (size i = start; i < stop; i += ROWS)
                    product(std::min(ROWS, stop - i), n, k, e.from(i, j), packed.get(), width, out.from(i, d),
                            add || j > 0, strip.get());
            }
        };
    });
}

// Write e^T x to out [V, D], or add it if add.
extern "C" int lowtide_multiply_transposed(size C, size D, size V, Matrix<const bf16> e, Matrix<const bf16> x,
                                           Matrix<float> out, bool add, int threads) try {
    // Round the depth up, so that different C give few depths: brgemm makes a kernel for each.
    const size depth = up(C, 8), stride = up(C, 32), share = up(parts_of(depth, threads), 2);
    const size width = std::min(up(D, 16), std::clamp<size>(SHARED / depth / 64 * 64, 64, 2 * COLUMNS));
    const Buffer<bf16> packed(depth * width);
    for (size d = 0; d < D; d += width) {
        const size columns = std::min(width, D - d);
        const auto pack = [&] {
            return [&](size task) {
                const size i = task * share, rows = std::min(share, depth - i);
                pack_rows(C - i, rows, columns, x.from(i, d), packed.get() + i * width, width);
            };
        };
        const auto multiply = [&] {
            return [&, turned = Buffer<bf16>(TURNED * stride)](size task) {
                const size j = task * TURNED, n = std::min(TURNED, V - j);
                turn(C, n, e.from(0, j), turned.get());
                for (size i = 0; i < n; i += ROWS)
                    brgemm(std::min(ROWS, n - i), columns, depth, stride, width, out.stride, add,
                           turned.get() + i * stride, packed.get(), out.at(j + i, d), true);
            };
        };
        if (each_task(threads, parts_of(depth, share), pack)) return 1;
        if (each_task(threads, parts_of(V, TURNED), multiply)) return 1;
    }
    return 0;
} catch (...) {
    return 1;
}
