// One decoded token a row, from embedding to logits, in one call: nothing runs between the kernels but barriers.
//
// The residual stream and every activation are fp32. Each worker normalises the rows for itself, which costs less than
// another barrier, and computes its share of every weight matrix; attention is shared out by query head.
#include <algorithm>

#include "blocks.h"

namespace neuronmm {
namespace {

constexpr int kHeadGroup = kMaxBatch;  // query heads scored in one pass over the keys of their KV head

// What the team shares: one call's activations.
struct Buffers {
    Rows x, q, k, v, attended, hidden, logits;
    Rows middles[3];  // rank intermediates of the linears that share an input
};

// What each worker has for itself.
struct Private {
    Rows normed;
    float* scores;  // [kHeadGroup, max_len]
};

class Step {
public:
    Step(const Model& model, const int64_t* tokens, const int32_t* starts, int slot, float* logits, int threads)
        : m_(model), tokens_(tokens), starts_(starts), slot_(slot) {
        static thread_local Scratch scratch;
        const int batch = m_.batch, q_size = m_.heads * m_.head_dim, kv_size = m_.kv_heads * m_.head_dim;
        int rank = max_rank({&m_.head});
        for (int i = 0; i < m_.layers; i++) {
            const Layer& l = m_.layer[i];
            rank = std::max(rank, max_rank({&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}));
        }
        const size_t shared = Scratch::size(batch, m_.hidden) + 2 * Scratch::size(batch, q_size) +
                        2 * Scratch::size(batch, kv_size) + Scratch::size(batch, m_.intermediate) +
                        3 * Scratch::size(batch, rank);
        const size_t each = Scratch::size(batch, m_.hidden) + Scratch::size(kHeadGroup, m_.max_len);
        scratch.reserve(shared + each * threads);
        buffers_ = {scratch.take(batch, m_.hidden),
                    scratch.take(batch, q_size),
                    scratch.take(batch, kv_size),
                    scratch.take(batch, kv_size),
                    scratch.take(batch, q_size),
                    scratch.take(batch, m_.intermediate),
                    {logits, static_cast<size_t>(m_.head.last().rows)},
                    {}};
        for (Rows& middle : buffers_.middles) middle = scratch.take(batch, rank);
        private_ = scratch.take(threads, static_cast<int>(each));
    }

    void run(const Worker& worker) const {
        float* mine = private_.row(worker.id);
        const size_t normed = Scratch::size(1, m_.hidden);
        const Private own{{mine, normed}, mine + normed * m_.batch};
        for (int b = worker.begin(m_.batch); b < worker.end(m_.batch); b++) embed(worker, b);
        worker.sync();
        for (int i = 0; i < m_.layers; i++) layer(worker, m_.layer[i], own);
        norm(worker, m_.final_norm, own);
        project(worker, {{m_.head, buffers_.middles[0], buffers_.logits}}, own.normed, m_.batch);
    }

private:
    // A barrier stands wherever the next phase reads what other workers wrote, or writes what they may still read; the
    // last one leaves x complete.
    void layer(const Worker& worker, const Layer& l, const Private& own) const {
        const Buffers& s = buffers_;
        norm(worker, l.input_norm, own);
        project(worker, {{l.q, s.middles[0], s.q}, {l.k, s.middles[1], s.k}, {l.v, s.middles[2], s.v}}, own.normed,
                m_.batch);
        worker.sync();
        append(worker, l);
        worker.sync();
        attend(worker, l, own);
        worker.sync();
        project(worker, {{l.o, s.middles[0], s.x}}, s.attended, m_.batch, true);
        worker.sync();
        norm(worker, l.post_norm, own);
        swiglu(worker, {l.gate, l.up, l.down, s.middles[0], s.middles[1], s.hidden, s.middles[0]}, own.normed,
               m_.batch, s.x, true);
        worker.sync();
    }

    void embed(const Worker& worker, int b) const {
        const Matrix& table = m_.embedding;
        const size_t bytes = table.type == kFloat32 ? 4 : table.type == kBFloat16 ? 2 : 1;
        const char* row = static_cast<const char*>(table.data) + tokens_[b] * bytes * table.cols;
        worker.kernels.widen(row, table.type, table.cols, buffers_.x.row(b));
        if (table.scale)
            for (int j = 0; j < table.cols; j++) buffers_.x.row(b)[j] *= table.scale[tokens_[b]];
    }

    void norm(const Worker& worker, const float* weight, const Private& own) const {
        for (int b = 0; b < m_.batch; b++)
            worker.kernels.rms_norm(buffers_.x.row(b), weight, m_.eps, m_.hidden, own.normed.row(b));
    }

    // QK-norm and RoPE in place on one head of the token at this step's position.
    void rotate(const Worker& worker, float* head, const float* head_norm, int position) const {
        const int half = m_.head_dim / 2;
        if (head_norm) worker.kernels.rms_norm(head, head_norm, m_.eps, m_.head_dim, head);
        const float* cos = m_.cos + static_cast<size_t>(position) * m_.head_dim;
        const float* sin = m_.sin + static_cast<size_t>(position) * m_.head_dim;
        for (int j = 0; j < half; j++) {
            const float left = head[j], right = head[j + half];
            head[j] = left * cos[j] - right * sin[j];
            head[j + half] = right * cos[j + half] + left * sin[j + half];
        }
    }

    // The cache of one KV head of one row from its first token on; `count` positions.
    Matrix cached(void* cache, int b, int kv_head, int start, int count) const {
        const size_t first = (static_cast<size_t>(b) * m_.kv_heads + kv_head) * m_.max_len + start;
        const size_t bytes = m_.cache_type == kFloat32 ? 4 : 2;
        return {static_cast<char*>(cache) + first * m_.head_dim * bytes, nullptr, count, m_.head_dim, m_.cache_type};
    }

    // Write this token's keys and values to the cache.
    void append(const Worker& worker, const Layer& l) const {
        const int items = m_.batch * m_.kv_heads;
        for (int item = worker.begin(items); item < worker.end(items); item++) {
            const int b = item / m_.kv_heads, head = item % m_.kv_heads;
            float* key = buffers_.k.row(b) + head * m_.head_dim;
            rotate(worker, key, l.k_norm, slot_ - starts_[b]);
            const float* value = buffers_.v.row(b) + head * m_.head_dim;
            worker.kernels.narrow(key, m_.cache_type, m_.head_dim,
                                  const_cast<void*>(cached(l.keys, b, head, slot_, 1).data));
            worker.kernels.narrow(value, m_.cache_type, m_.head_dim,
                                  const_cast<void*>(cached(l.values, b, head, slot_, 1).data));
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
        worker.kernels.rows(keys, 0, filled, q, d, count, own.scores, m_.max_len, nullptr, false);
        for (int i = 0; i < count; i++) {
            float* scores = own.scores + static_cast<size_t>(i) * m_.max_len;
            worker.kernels.softmax(scores, filled, m_.scale);
            worker.kernels.weighted_sum(values, scores, buffers_.attended.row(b) + (head + i) * d);
        }
    }

    const Model& m_;
    const int64_t* tokens_;
    const int32_t* starts_;
    int slot_;
    Buffers buffers_;
    Rows private_;
};

}  // namespace
}  // namespace neuronmm

int neuronmm_decode_step(const neuronmm::Model* model, const int64_t* tokens, const int32_t* starts, int32_t slot,
                         float* logits, int32_t threads) {
    if (slot < 0 || slot >= model->max_len) return -1;
    for (int b = 0; b < model->batch; b++)
        if (tokens[b] < 0 || tokens[b] >= model->embedding.rows || starts[b] < 0 || starts[b] > slot) return -1;
    const neuronmm::Step step(*model, tokens, starts, slot, logits, threads);
    neuronmm::run_team(threads, [&](const neuronmm::Worker& worker) { step.run(worker); });
    return 0;
}
