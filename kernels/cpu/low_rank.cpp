// The two ops of the dispatch table: low_rank_linear and low_rank_swiglu.
#include "blocks.h"
#include "pivots.h"

namespace neuronmm {
namespace {

// Convert x to fp32, compute y in fp32 on a team of workers, and convert y to the type of x.
template <class Compute>
void run(const void* x, int in, void* y, int out, int type, int batch, int threads, Scratch& scratch,
         const Compute& compute) {
    const Rows wide = scratch.take(batch, in), result = scratch.take(batch, out);
    const size_t bytes = type == kFloat32 ? 4 : 2;
    for (int b = 0; b < batch; b++)
        active().widen(static_cast<const char*>(x) + b * in * bytes, type, in, wide.row(b));
    run_team(threads, [&](const Worker& worker) {
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

}  // namespace
}  // namespace neuronmm

using namespace neuronmm;

int neuronmm_pivots_fit(const Linear* linear) { return pivots_fit(*linear); }

void neuronmm_low_rank_linear(const Linear* linear, const void* x, int32_t type, int32_t batch, void* y,
                              int32_t threads) {
    const int in = linear->in(), out = linear->out(), rank = max_rank({linear});
    Scratch& scratch = scratch_of(Scratch::size(batch, in) + Scratch::size(batch, out) + Scratch::size(batch, rank));
    const Rows ax = scratch.take(batch, rank);
    run(x, in, y, out, type, batch, threads, scratch, [&](const Worker& worker, Rows wide, Rows result) {
        project(worker, {{*linear, ax, result}}, wide, batch);
    });
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
    run(x, hidden, y, out, type, batch, threads, scratch, [&](const Worker& worker, Rows wide, Rows result) {
        swiglu(worker, mlp, wide, batch, result, false);
    });
}
