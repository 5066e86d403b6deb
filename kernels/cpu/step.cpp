// Tokens from embedding to logits in one call: nothing runs between the kernels but barriers. One token a row is a decode
// step; several are a prompt, whose tokens are rows of the same products.
//
// The residual stream and every activation are fp32. Each worker normalises the rows for itself, which costs less than
// another barrier, and computes its share of every weight matrix; attention is shared out by query head, and by blocks of
// positions in a prompt.
#include <algorithm>
#include <vector>

#include "blocks.h"

namespace neuronmm {
namespace {

constexpr int kHeadGroup = kMaxBatch;  // query heads scored in one pass over the keys of their KV head
constexpr int kQueries = 120;          // query rows of a prompt scored together, at most
constexpr int kChunk = 512;            // rows at once; longer prompts are read in several steps

// What the team shares: one call's activations.
struct Buffers {
    Rows x, normed, q, k, v, attended, hidden, up, logits;
    Rows middles[3];  // rank intermediates of the linears that share an input
};

// What each worker has for itself.
struct Private {
    Rows normed;  // [kMaxBatch, hidden]
    Rows scores;  // [kHeadGroup or kQueries, max_len]
    Rows queries; // [kQueries, head_dim], of a prompt: rounded the queries, otherwise their results
};

class Step {
public:
    // `count` tokens of every row, which are `stride` apart, for the slots from `slot` on; logits may be null.
    Step(const Model& model, const int64_t* tokens, int stride, int count, const int32_t* starts, int slot, float* logits,
         int threads)
        : m_(model), tokens_(tokens), stride_(stride), count_(count), starts_(starts), slot_(slot), own_(threads) {
        static thread_local Scratch scratch;
        const int rows = m_.batch * count, q_size = m_.heads * m_.head_dim, kv_size = m_.kv_heads * m_.head_dim;
        int rank = max_rank({&m_.head});
        for (int i = 0; i < m_.layers; i++) {
            const Layer& l = m_.layer[i];
            rank = std::max(rank, max_rank({&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}));
        }
        const int queries = count == 1 ? kHeadGroup : kQueries;
        scratch.reserve(2 * Scratch::size(rows, m_.hidden) + 2 * Scratch::size(rows, q_size) +
                        2 * Scratch::size(rows, kv_size) + 2 * Scratch::size(rows, m_.intermediate) +
                        3 * Scratch::size(rows, rank) +
                        threads * (Scratch::size(kMaxBatch, m_.hidden) + Scratch::size(queries, m_.max_len) +
                                   Scratch::size(queries, m_.head_dim)));
        buffers_ = {scratch.take(rows, m_.hidden),
                    scratch.take(rows, m_.hidden),
                    scratch.take(rows, q_size),
                    scratch.take(rows, kv_size),
                    scratch.take(rows, kv_size),
                    scratch.take(rows, q_size),
                    scratch.take(rows, m_.intermediate),
                    scratch.take(rows, m_.intermediate),
                    {logits, static_cast<size_t>(m_.head.last().rows)},
                    {}};
        for (Rows& middle : buffers_.middles) middle = scratch.take(rows, rank);
        for (Private& own : own_)
            own = {scratch.take(kMaxBatch, m_.hidden), scratch.take(queries, m_.max_len),
                   scratch.take(queries, m_.head_dim)};
    }

    void run(const Worker& worker) const {
        const Private& own = own_[worker.id];
        const int rows = m_.batch * count_;
        for (int i = worker.begin(rows); i < worker.end(rows); i++) embed(worker, i);
        worker.sync();
        for (int i = 0; i < m_.layers; i++) {
            remember(worker, m_.layer[i], own);
            if (i + 1 < m_.layers) transform(worker, m_.layer[i], own);
        }
        // Of a prompt's last layer only keys and values are of use, and for the logits the last token.
        if (!buffers_.logits.data) return;
        if (count_ == 1)
            finish(worker, own);
        else
            last_token().finish(worker, own);
    }

private:
    void finish(const Worker& worker, const Private& own) const {
        transform(worker, m_.layer[m_.layers - 1], own);
        for (int b = 0; b < m_.batch; b++)
            worker.kernels.rms_norm(buffers_.x.row(b), m_.final_norm, m_.eps, m_.hidden,
                                    own.normed.row(b));
        project(worker, {{m_.head, buffers_.middles[0], buffers_.logits}}, own.normed, m_.batch);
    }

    // The step of each row's last token alone, in the same buffers.
    Step last_token() const {
        Step last(*this);
        last.slot_ += count_ - 1;
        last.count_ = 1;
        Buffers& s = last.buffers_;
        for (Rows* rows : {&s.x, &s.q, &s.attended, &s.hidden, &s.up, &s.middles[0], &s.middles[1], &s.middles[2]})
            *rows = {rows->row(count_ - 1), rows->stride * count_};
        return last;
    }

    // A barrier stands wherever the next phase reads what other workers wrote, or writes what they may still read; the
    // last one leaves x complete.
    void remember(const Worker& worker, const Layer& l, const Private& own) const {
        const Buffers& s = buffers_;
        const int rows = m_.batch * count_;
        const Rows normed = norm(worker, l.input_norm, own);
        project(worker, {{l.q, s.middles[0], s.q}, {l.k, s.middles[1], s.k}, {l.v, s.middles[2], s.v}}, normed, rows);
        worker.sync();
        append(worker, l);
        worker.sync();
    }

    void transform(const Worker& worker, const Layer& l, const Private& own) const {
        const Buffers& s = buffers_;
        const int rows = m_.batch * count_;
        if (count_ == 1)
            attend(worker, l, own);
        else
            attend_prompt(worker, l, own);
        worker.sync();
        project(worker, {{l.o, s.middles[0], s.x}}, s.attended, rows, true);
        worker.sync();
        const Rows normed = norm(worker, l.post_norm, own);
        swiglu(worker, {l.gate, l.up, l.down, s.middles[0], s.middles[1], s.hidden, s.up, s.middles[0]}, normed, rows,
               s.x, true);
        worker.sync();
    }

    void embed(const Worker& worker, int i) const {
        const Matrix& table = m_.embedding;
        const int64_t token = tokens_[i / count_ * stride_ + i % count_];
        const char* row = static_cast<const char*>(table.data) + token * table.row_bytes();
        worker.kernels.widen(row, table.type, table.cols, buffers_.x.row(i));
        if (table.scale)
            for (int j = 0; j < table.cols; j++) buffers_.x.row(i)[j] *= table.scale[token];
    }

    // The rows normalised: by each worker for itself, or many by all of them together.
    Rows norm(const Worker& worker, const float* weight, const Private& own) const {
        const int rows = m_.batch * count_;
        const bool together = rows > kMaxBatch;
        const Rows& to = together ? buffers_.normed : own.normed;
        for (int i = together ? worker.begin(rows) : 0; i < (together ? worker.end(rows) : rows); i++) {
            worker.kernels.rms_norm(buffers_.x.row(i), weight, m_.eps, m_.hidden, to.row(i));
            if (!together) continue;
            round_columns(worker.kernels, {to.row(i), to.stride, to.rounded + i * to.stride}, 0, m_.hidden, m_.hidden, 1);
        }
        if (together) worker.sync();
        return to;
    }

    // QK-norm and RoPE in place on one head of the token at this step's position.
    void rotate(const Worker& worker, float* head, const float* head_norm, int position) const {
        if (head_norm) worker.kernels.rms_norm(head, head_norm, m_.eps, m_.head_dim, head);
        const size_t at = static_cast<size_t>(position) * m_.head_dim;
        worker.kernels.rotate(head, m_.cos + at, m_.sin + at, m_.head_dim / 2);
    }

    // The cache of one KV head of one row from its first token on; `count` positions.
    Matrix cached(void* cache, int b, int kv_head, int start, int count) const {
        const size_t first = (static_cast<size_t>(b) * m_.kv_heads + kv_head) * m_.max_len + start;
        const size_t bytes = m_.cache_type == kFloat32 ? 4 : 2;
        return {static_cast<char*>(cache) + first * m_.head_dim * bytes, nullptr, count, m_.head_dim, m_.cache_type};
    }

    // Write the tokens' keys and values to the cache. Padding has keys, too, which nobody reads.
    void append(const Worker& worker, const Layer& l) const {
        const int items = m_.batch * count_ * m_.kv_heads;
        for (int item = worker.begin(items); item < worker.end(items); item++) {
            const int row = item / m_.kv_heads, head = item % m_.kv_heads, b = row / count_, slot = slot_ + row % count_;
            float* key = buffers_.k.row(row) + head * m_.head_dim;
            rotate(worker, key, l.k_norm, std::max(slot - starts_[b], 0));
            const float* value = buffers_.v.row(row) + head * m_.head_dim;
            worker.kernels.narrow(key, m_.cache_type, m_.head_dim,
                                  const_cast<void*>(cached(l.keys, b, head, slot, 1).data));
            worker.kernels.narrow(value, m_.cache_type, m_.head_dim,
                                  const_cast<void*>(cached(l.values, b, head, slot, 1).data));
        }
    }

    // Attention of this worker's query heads. Consecutive heads of one KV head are scored in one pass over its keys,
    // as a batch of that many rows.
    void attend(const Worker& worker, const Layer& l, const Private& own) const {
        const int group = m_.heads / m_.kv_heads, items = m_.batch * m_.heads, end = worker.end(items);
        for (int item = worker.begin(items); item < end;) {
            const int b = item / m_.heads, head = item % m_.heads, kv_head = head / group;
            const int count = std::min({(kv_head + 1) * group - head, end - item, kHeadGroup});
            attend(worker, l, own, b, head, kv_head, count);
            item += count;
        }
    }

    void attend(const Worker& worker, const Layer& l, const Private& own, int b, int head, int kv_head,
                int count) const {
        const int d = m_.head_dim, start = starts_[b], filled = slot_ + 1 - start;
        float* q = buffers_.q.row(b) + head * d;
        for (int i = 0; i < count; i++) rotate(worker, q + i * d, l.q_norm, slot_ - start);
        const Matrix keys = cached(l.keys, b, kv_head, start, filled);
        const Matrix values = cached(l.values, b, kv_head, start, filled);
        const Inputs queries = worker.kernels.prepare(q, d, d, count, m_.cache_type);
        worker.kernels.rows(keys, 0, filled, queries, count, own.scores.data, own.scores.stride, nullptr, false);
        for (int i = 0; i < count; i++) {
            float* scores = own.scores.row(i);
            worker.kernels.softmax(scores, filled, m_.scale);
            worker.kernels.weighted_sum(values, scores, buffers_.attended.row(b) + (head + i) * d);
        }
    }

    // Causal attention of a prompt. An item is a block of positions with all query heads of one KV head; the workers take
    // items in turn, since later positions see more.
    void attend_prompt(const Worker& worker, const Layer& l, const Private& own) const {
        const int group = m_.heads / m_.kv_heads, block = std::max(1, kQueries / group);
        const int lanes = m_.batch * m_.kv_heads, items = (count_ + block - 1) / block * lanes;
        for (int item = worker.id; item < items; item += worker.count) {
            const int first = item / lanes * block, lane = item % lanes;
            attend_block(worker, l, own, lane / m_.kv_heads, lane % m_.kv_heads, first, std::min(block, count_ - first));
        }
    }

    // Positions first to first + n of the prompt part at hand; `group` query heads at a time, at most kQueries rows.
    void attend_block(const Worker& worker, const Layer& l, const Private& own, int b, int kv_head, int first,
                      int n) const {
        const int d = m_.head_dim, group = m_.heads / m_.kv_heads, start = starts_[b];
        const int filled = std::max(slot_ + first + n - start, 0);  // positions that the last of them sees
        const Matrix keys = cached(l.keys, b, kv_head, start, filled);
        const Matrix values = cached(l.values, b, kv_head, start, filled);
        const Rows &scores = own.scores, &queries = own.queries, &to = buffers_.attended;
        const int at_once = std::min(group, std::max(1, kQueries / n));
        for (int g = 0; g < group; g += at_once) {
            const int rows = std::min(at_once, group - g) * n;
            // Query row i is head g + i / n of the token in row_of(i).
            const auto row_of = [&](int i) { return b * count_ + first + i % n; };
            const auto column_of = [&](int i) { return (kv_head * group + g + i / n) * d; };
            for (int i = 0; i < rows; i++) {
                float* q = buffers_.q.row(row_of(i)) + column_of(i);
                rotate(worker, q, l.q_norm, std::max(slot_ + first + i % n - start, 0));
                worker.kernels.narrow(q, kBFloat16, d, queries.rounded + i * queries.stride);
            }
            worker.kernels.gemm(keys, 0, filled, queries.rounded, queries.stride, rows, scores.data, scores.stride,
                                nullptr, false);
            for (int i = 0; i < rows; i++) {
                const int seen = std::max(slot_ + first + i % n + 1 - start, 0);
                if (seen) worker.kernels.softmax(scores.row(i), seen, m_.scale);
                std::fill(scores.row(i) + seen, scores.row(i) + filled, 0.0f);
            }
            round_columns(worker.kernels, scores, 0, filled, filled, rows);
            worker.kernels.mix(values, scores.rounded, scores.stride, rows, queries.data, queries.stride);
            for (int i = 0; i < rows; i++) {
                std::copy(queries.row(i), queries.row(i) + d, to.row(row_of(i)) + column_of(i));
                if (to.rounded)
                    worker.kernels.narrow(queries.row(i), kBFloat16, d,
                                          to.rounded + row_of(i) * to.stride + column_of(i));
            }
        }
    }

    const Model& m_;
    const int64_t* tokens_;
    int stride_, count_;
    const int32_t* starts_;
    int slot_;
    Buffers buffers_;
    std::vector<Private> own_;
};

}  // namespace
}  // namespace neuronmm

int neuronmm_reads_prompts(const neuronmm::Model* model) {
    using namespace neuronmm;
    const auto fits = [](const Matrix& m) { return !m.data || m.type != kFloat32; };
    bool all = active().gemm && model->cache_type == kBFloat16 && fits(model->head.a) && fits(model->head.b);
    for (int i = 0; i < model->layers; i++) {
        const Layer& l = model->layer[i];
        for (const Linear* linear : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down})
            all = all && fits(linear->a) && fits(linear->b);
    }
    return all;
}

int neuronmm_step(const neuronmm::Model* model, const int64_t* tokens, int32_t count, const int32_t* starts,
                  int32_t slot, float* logits, int32_t threads) {
    if (count < 1 || slot < 0 || slot > model->max_len - count) return -1;
    if (count > 1 && !neuronmm_reads_prompts(model)) return -1;
    for (int i = 0; i < model->batch * count; i++)
        if (tokens[i] < 0 || tokens[i] >= model->embedding.rows) return -1;
    for (int b = 0; b < model->batch; b++)
        if (starts[b] < 0 || starts[b] > slot + count - 1) return -1;
    const int most = std::max(1, neuronmm::kChunk / model->batch);
    for (int done = 0, n; done < count; done += n) {
        n = std::min(most, count - done);
        const neuronmm::Step step(*model, tokens + done, count, n, starts, slot + done,
                                  done + n == count ? logits : nullptr, threads);
        neuronmm::run_team(threads, [&](const neuronmm::Worker& worker) { step.run(worker); });
    }
    return 0;
}
