// The two ops of the dispatch table, low_rank_linear and low_rank_swiglu; and linears, several linears of one input.
#include <algorithm>

#include "blocks.h"
#include "pivots.h"

namespace neuronmm {
namespace {

// Convert x to fp32, compute y in fp32 on a team of workers, and convert y to the type of x. More than kMaxBatch rows
// are converted by the team, and rounded for GEMMs if there are any.
template <class Compute>
void run(const void* x, int in, void* y, int out, int type, int batch, bool gemm, int threads, Scratch& scratch,
         const Compute& compute) {
    Rows wide = scratch.take(batch, in);
    const Rows result = scratch.take(batch, out);
    if (!gemm) wide.rounded = nullptr;
    const size_t bytes = type == kFloat32 ? 4 : 2;
    const auto convert = [&](const Kernels& kernels, int begin, int end) {
        for (int b = begin; b < end; b++) {
            kernels.widen(static_cast<const char*>(x) + static_cast<size_t>(b) * in * bytes, type, in, wide.row(b));
            uint16_t* rounded = wide.rounded ? wide.rounded + b * wide.stride : nullptr;
            round_columns(kernels, {wide.row(b), wide.stride, rounded}, 0, in, in, 1);
        }
    };
    const bool split = batch > kMaxBatch;
    if (!split) convert(active(), 0, batch);
    run_team(threads, [&](const Worker& worker) {
        if (split) {
            convert(worker.kernels, worker.begin(batch), worker.end(batch));
            worker.sync();
        }
        compute(worker, wide, result);
        worker.sync();
        const int begin = worker.begin(out), count = worker.end(out) - begin;
        for (int b = 0; b < batch; b++)
            worker.kernels.narrow(result.row(b) + begin, type, count,
                                  static_cast<char*>(y) + (static_cast<size_t>(b) * out + begin) * bytes);
    });
}

Scratch& scratch_of(size_t floats) {
    static thread_local Scratch scratch;
    scratch.reserve(floats);
    return scratch;
}

constexpr int kMaxGroup = 3;       // most linears of one input
constexpr int kLinearsRows = 256;  // most rows that `linears` multiplies at once, so that they stay in the cache
constexpr int kGemvRows = 16;      // up to so many rows GEMVs of kMaxBatch rows are faster than a GEMM in bf16 or fp32

// Whether GEMMs can multiply rows of `type` with every matrix of the group.
bool has_gemm(const Linear* linears, int count, int type) {
    const auto fits = [](const Matrix& m) { return !m.data || m.type != kFloat32; };
    return type == kBFloat16 && active().gemm_nt &&
           std::all_of(linears, linears + count, [&](const Linear& l) { return fits(l.a) && fits(l.b); });
}

// y [batch, sum of the outputs] of a group of linears; `gemm`: by GEMMs.
void run_group(const Linear* linears, int count, const void* x, int type, int batch, bool gemm, void* y, int threads) {
    int begin[kMaxGroup + 1] = {0}, rank = 0;
    for (int i = 0; i < count; i++) {
        begin[i + 1] = begin[i] + linears[i].out();
        rank = std::max(rank, max_rank({&linears[i]}));
    }
    const int in = linears[0].in(), out = begin[count];
    Scratch& scratch = scratch_of(Scratch::size(batch, in) + Scratch::size(batch, out) +
                                  kMaxGroup * Scratch::size(batch, rank));
    Rows ax[kMaxGroup] = {scratch.take(batch, rank), scratch.take(batch, rank), scratch.take(batch, rank)};
    for (Rows& rows : ax)
        if (!gemm) rows.rounded = nullptr;
    run(x, in, y, out, type, batch, gemm, threads, scratch, [&](const Worker& worker, Rows wide, Rows result) {
        const auto part = [&](int i) { return Projection{linears[i], ax[i], {result.data + begin[i], result.stride}}; };
        if (count == 1)
            project(worker, {part(0)}, wide, batch);
        else if (count == 2)
            project(worker, {part(0), part(1)}, wide, batch);
        else
            project(worker, {part(0), part(1), part(2)}, wide, batch);
    });
}

}  // namespace
}  // namespace neuronmm

using namespace neuronmm;

int neuronmm_pivots_fit(const Linear* linear) { return pivots_fit(*linear); }

void neuronmm_low_rank_linear(const Linear* linear, const void* x, int32_t type, int32_t batch, void* y,
                              int32_t threads) {
    run_group(linear, 1, x, type, batch, false, y, threads);
}

int neuronmm_linear_group(const Linear* linears, int32_t count, const void* x, int32_t type, int32_t rows, int64_t in,
                          void* y, int64_t out, int32_t threads) {
    if (count < 1 || count > kMaxGroup) return -1;
    int64_t sum = 0;
    for (int i = 0; i < count; i++) {
        if (linears[i].in() != in) return -1;
        sum += linears[i].out();
    }
    if (sum != out) return -1;
    const size_t bytes = type == kFloat32 ? 4 : 2;
    const bool gemm = rows > kGemvRows && has_gemm(linears, count, type);
    for (size_t done = 0, n; done < static_cast<size_t>(rows); done += n) {
        // The last rows of a GEMM, if few, go with those before. Alone they would go through GEMVs, which round in another
        // way.
        const size_t left = rows - done, most = kLinearsRows + (gemm ? kMaxBatch : 0);
        n = left <= most ? left : kLinearsRows;
        run_group(linears, count, static_cast<const char*>(x) + done * in * bytes, type, static_cast<int>(n),
                  gemm && n > kMaxBatch, static_cast<char*>(y) + done * out * bytes, threads);
    }
    return 0;
}

void neuronmm_low_rank_swiglu(const Linear* gate, const Linear* up, const Linear* down, const void* x, int32_t type,
                              int32_t batch, void* y, int32_t threads) {
    const int hidden = gate->in(), intermediate = gate->out(), out = down->out(), rank = max_rank({gate, up, down});
    Scratch& scratch = scratch_of(Scratch::size(batch, hidden) + Scratch::size(batch, out) +
                                  2 * Scratch::size(batch, intermediate) + 3 * Scratch::size(batch, rank));
    const SwiGLU mlp{*gate,
                     *up,
                     *down,
                     scratch.take(batch, rank),
                     scratch.take(batch, rank),
                     scratch.take(batch, intermediate),
                     scratch.take(batch, intermediate),
                     scratch.take(batch, rank)};
    run(x, hidden, y, out, type, batch, false, threads, scratch, [&](const Worker& worker, Rows wide, Rows result) {
        swiglu(worker, mlp, wide, batch, result, false);
    });
}
