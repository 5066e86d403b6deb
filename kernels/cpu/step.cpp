// A step takes tokens from embedding to logits; only barriers run between the kernels. Each token is one row of the
// same matmuls. A decode step has one token per sequence, or several whose logits are all wanted: at most kMaxBatch
// tokens, each of which is computed as if it were alone. A prefill step has several tokens per sequence and returns the
// logits of the last ones. One call of neuronmm_step runs one decode step, or as many prefill steps as the prompt
// needs; neuronmm_verify and neuronmm_step_lanes run one decode step.
//
// The residual stream and all activations are fp32. In a decode step every worker normalises all rows itself, because
// that costs less than a barrier. Weight matrices are split over the workers by rows, decode attention by query head,
// prefill attention by blocks of positions.
#include <algorithm>
#include <utility>
#include <vector>

#include "blocks.h"

namespace neuronmm {
namespace {

constexpr int kDecodeHeads = kMaxBatch;  // query heads of a KV head that are computed together
constexpr int kPrefillQueries = 120;     // most query rows that prefill attention scores together
constexpr int64_t kFetched = 4096;       // bytes of keys, and of values, that decode attention fetches beforehand
constexpr int kPrefillRows = 512;        // rows of one prefill step; a longer prompt takes several steps

// Activations of one step, shared by all workers.
struct Buffers {
    Rows x, normed, q, k, v, attended, hidden, up, logits;
    Rows ax[3];  // A x [rows, rank] of up to three linears that share their input
};

// Buffers of one worker.
struct WorkerBuffers {
    Rows normed;  // [kMaxBatch, hidden]
    Rows scores;  // [kDecodeHeads or kPrefillQueries, max_len]
    Rows queries; // [kPrefillQueries, head_dim]; prefill keeps the queries in `rounded` and their results in `data`
};

// The sequence of one lane (row) of the cache: its first slot that holds a token, and the slot of its next one.
struct Sequence {
    int lane, start, slot;
};

class Step {
public:
    // Process `count` tokens of every sequence and write them to its cache slots from `slot` on. The tokens of
    // consecutive sequences are `stride` apart. `decode` computes the logits of every token; a prefill those of the
    // last ones, or none if `logits` is null.
    Step(const Model& model, const int64_t* tokens, int stride, int count, bool decode,
         std::vector<Sequence> sequences, float* logits, int threads)
        : m_(model), tokens_(tokens), stride_(stride), count_(count), decode_(decode), sequences_(std::move(sequences)),
          worker_buffers_(threads) {
        static thread_local Scratch scratch;
        const int rows = this->rows(), q_size = m_.heads * m_.head_dim, kv_size = m_.kv_heads * m_.head_dim;
        int rank = max_rank({&m_.head});
        for (int i = 0; i < m_.layers; i++) {
            const Layer& l = m_.layer[i];
            rank = std::max(rank, max_rank({&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}));
        }
        const int queries = decode ? kDecodeHeads : kPrefillQueries;
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
                    {logits, static_cast<size_t>(m_.head.out())},
                    {}};
        for (Rows& ax : buffers_.ax) ax = scratch.take(rows, rank);
        for (WorkerBuffers& local : worker_buffers_)
            local = {scratch.take(kMaxBatch, m_.hidden), scratch.take(queries, m_.max_len),
                     scratch.take(queries, m_.head_dim)};
    }

    void run(const Worker& worker) const {
        const WorkerBuffers& local = worker_buffers_[worker.id];
        const int rows = this->rows();
        for (int i = worker.begin(rows); i < worker.end(rows); i++) embed(worker, i);
        worker.sync();
        for (int i = 0; i < m_.layers; i++) {
            append_kv(worker, m_.layer[i], local);
            if (i + 1 < m_.layers) attention_and_mlp(worker, m_.layer[i], local);
        }
        // In the last layer of a prefill only the keys, the values and the last token's output are needed.
        if (!buffers_.logits.data) return;
        if (decode_)
            last_layer_and_head(worker, local);
        else
            last_token().last_layer_and_head(worker, local);
    }

private:
    int rows() const { return static_cast<int>(sequences_.size()) * count_; }

    const Sequence& sequence(int row) const { return sequences_[row / count_]; }

    // The cache slot of the token in activation row `row`, and its position in its sequence.
    int slot(int row) const { return sequence(row).slot + row % count_; }
    int position(int row) const { return slot(row) - sequence(row).start; }

    void last_layer_and_head(const Worker& worker, const WorkerBuffers& local) const {
        attention_and_mlp(worker, m_.layer[m_.layers - 1], local);
        const int rows = this->rows();
        for (int i = 0; i < rows; i++)
            worker.kernels.rms_norm(buffers_.x.row(i), m_.final_norm, m_.eps, m_.hidden, local.normed.row(i));
        project(worker, {{m_.head, buffers_.ax[0], buffers_.logits}}, local.normed, rows);
    }

    // The decode step of each sequence's last token, on the same buffers.
    Step last_token() const {
        Step last(*this);
        for (Sequence& sequence : last.sequences_) sequence.slot += count_ - 1;
        last.count_ = 1;
        last.decode_ = true;
        Buffers& s = last.buffers_;
        for (Rows* rows : {&s.x, &s.q, &s.attended, &s.hidden, &s.up, &s.ax[0], &s.ax[1], &s.ax[2]})
            *rows = {rows->row(count_ - 1), rows->stride * count_};
        return last;
    }

    // A barrier separates two phases if the second reads what other workers write in the first, or writes what they
    // may still read. After the last barrier x is complete.

    // Compute queries, keys and values, and append keys and values to the cache.
    void append_kv(const Worker& worker, const Layer& l, const WorkerBuffers& local) const {
        const Buffers& s = buffers_;
        const Rows normed = norm(worker, l.input_norm, local);
        project(worker, {{l.q, s.ax[0], s.q}, {l.k, s.ax[1], s.k}, {l.v, s.ax[2], s.v}}, normed, rows());
        if (decode_) fetch_cache(worker, l);
        worker.sync();
        write_cache(worker, l);
        worker.sync();
    }

    void attention_and_mlp(const Worker& worker, const Layer& l, const WorkerBuffers& local) const {
        attention(worker, l, local);
        mlp(worker, l, local);
    }

    // Attention and the output projection; the result is added to the residual stream.
    void attention(const Worker& worker, const Layer& l, const WorkerBuffers& local) const {
        const Buffers& s = buffers_;
        if (decode_)
            decode_attention(worker, l, local);
        else
            prefill_attention(worker, l, local);
        worker.sync();
        project(worker, {{l.o, s.ax[0], s.x}}, s.attended, rows(), true);
        worker.sync();
    }

    // The SwiGLU MLP; the result is added to the residual stream.
    void mlp(const Worker& worker, const Layer& l, const WorkerBuffers& local) const {
        const Buffers& s = buffers_;
        const Rows normed = norm(worker, l.post_norm, local);
        swiglu(worker, {l.gate, l.up, l.down, s.ax[0], s.ax[1], s.hidden, s.up, s.ax[0]}, normed, rows(), s.x,
               true);
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

    // Normalise the rows. Each worker normalises all of up to kMaxBatch rows into its own buffer; more rows are split
    // over the team.
    Rows norm(const Worker& worker, const float* weight, const WorkerBuffers& local) const {
        const int rows = this->rows();
        const bool split = rows > kMaxBatch;
        const Rows& to = split ? buffers_.normed : local.normed;
        for (int i = split ? worker.begin(rows) : 0; i < (split ? worker.end(rows) : rows); i++) {
            worker.kernels.rms_norm(buffers_.x.row(i), weight, m_.eps, m_.hidden, to.row(i));
            if (!split) continue;
            round_columns(worker.kernels, {to.row(i), to.stride, to.rounded + i * to.stride}, 0, m_.hidden, m_.hidden,
                          1);
        }
        if (split) worker.sync();
        return to;
    }

    // Apply QK-norm and RoPE in place to one head at `position`.
    void rotate(const Worker& worker, float* head, const float* head_norm, int position) const {
        if (head_norm) worker.kernels.rms_norm(head, head_norm, m_.eps, m_.head_dim, head);
        const size_t at = static_cast<size_t>(position) * m_.head_dim;
        worker.kernels.rotate(head, m_.cos + at, m_.sin + at, m_.head_dim / 2);
    }

    // The cache of one KV head of a lane: `count` positions from slot `start` on.
    Matrix cached(void* cache, int lane, int kv_head, int start, int count) const {
        const size_t first = (static_cast<size_t>(lane) * m_.kv_heads + kv_head) * m_.max_len + start;
        const size_t bytes = m_.cache_type == kFloat32 ? 4 : 2;
        return {static_cast<char*>(cache) + first * m_.head_dim * bytes, nullptr, count, m_.head_dim, m_.cache_type};
    }

    // The positions that the token in activation row `row` attends to, up to its own.
    Matrix attended_by(int row, void* cache, int kv_head) const {
        return cached(cache, sequence(row).lane, kv_head, sequence(row).start, position(row) + 1);
    }

    // Write the tokens' keys and values to the cache. Padding gets keys and values too; no query reads them.
    void write_cache(const Worker& worker, const Layer& l) const {
        const int items = rows() * m_.kv_heads;
        for (int item = worker.begin(items); item < worker.end(items); item++) {
            const int row = item / m_.kv_heads, head = item % m_.kv_heads;
            const int lane = sequence(row).lane;
            float* key = buffers_.k.row(row) + head * m_.head_dim;
            rotate(worker, key, l.k_norm, std::max(position(row), 0));
            const float* value = buffers_.v.row(row) + head * m_.head_dim;
            worker.kernels.narrow(key, m_.cache_type, m_.head_dim,
                                  const_cast<void*>(cached(l.keys, lane, head, slot(row), 1).data));
            worker.kernels.narrow(value, m_.cache_type, m_.head_dim,
                                  const_cast<void*>(cached(l.values, lane, head, slot(row), 1).data));
        }
    }

    // Prefetch the keys and values that this worker's decode attention reads first, while others finish their phase.
    void fetch_cache(const Worker& worker, const Layer& l) const {
        const int head = worker.begin(rows() * m_.heads), row = head / m_.heads;
        const int kv_head = head % m_.heads / (m_.heads / m_.kv_heads);
        for (void* cache : {l.keys, l.values}) {
            const Matrix m = attended_by(row, cache, kv_head);
            for (int64_t at = 0; at < std::min(kFetched, m.rows * m.row_bytes()); at += kCacheLine)
                __builtin_prefetch(static_cast<const char*>(m.data) + at, 0, 2);
        }
    }

    // Attention of this worker's query heads: those of one token and KV head together, up to kDecodeHeads.
    void decode_attention(const Worker& worker, const Layer& l, const WorkerBuffers& local) const {
        const int group = m_.heads / m_.kv_heads, items = rows() * m_.heads, end = worker.end(items);
        for (int item = worker.begin(items); item < end;) {
            const int row = item / m_.heads, head = item % m_.heads, kv_head = head / group;
            const int count = std::min({(kv_head + 1) * group - head, end - item, kDecodeHeads});
            decode_attention(worker, l, local, row, head, kv_head, count);
            item += count;
        }
    }

    void decode_attention(const Worker& worker, const Layer& l, const WorkerBuffers& local, int row, int head,
                          int kv_head, int count) const {
        const int d = m_.head_dim;
        float* q = buffers_.q.row(row) + head * d;
        for (int i = 0; i < count; i++) rotate(worker, q + i * d, l.q_norm, position(row));
        worker.kernels.attend(attended_by(row, l.keys, kv_head), attended_by(row, l.values, kv_head), q, count,
                              m_.scale, local.scores.data, local.scores.stride,
                              buffers_.attended.row(row) + head * d);
    }

    // Causal attention of a prefill. An item is a block of positions with all query heads of one KV head. Items are
    // dealt to the workers in turn, because later positions attend to more keys.
    void prefill_attention(const Worker& worker, const Layer& l, const WorkerBuffers& local) const {
        const int group = m_.heads / m_.kv_heads, block = std::max(1, kPrefillQueries / group);
        const int each = static_cast<int>(sequences_.size()) * m_.kv_heads;  // items of one block
        const int items = (count_ + block - 1) / block * each;
        for (int item = worker.id; item < items; item += worker.count) {
            const int first = item / each * block, head = item % each;
            prefill_block(worker, l, local, head / m_.kv_heads, head % m_.kv_heads, first,
                          std::min(block, count_ - first));
        }
    }

    // Attention of positions [first, first + n) of this step in sequence b. It scores as many query heads together as
    // fit into kPrefillQueries rows.
    void prefill_block(const Worker& worker, const Layer& l, const WorkerBuffers& local, int b, int kv_head, int first,
                      int n) const {
        const int d = m_.head_dim, group = m_.heads / m_.kv_heads;
        const Sequence& of = sequences_[b];
        const int filled = std::max(of.slot + first + n - of.start, 0);  // positions that the last query attends to
        const Matrix keys = cached(l.keys, of.lane, kv_head, of.start, filled);
        const Matrix values = cached(l.values, of.lane, kv_head, of.start, filled);
        const Rows &scores = local.scores, &queries = local.queries, &to = buffers_.attended;
        const int at_once = std::min(group, std::max(1, kPrefillQueries / n));
        for (int g = 0; g < group; g += at_once) {
            const int rows = std::min(at_once, group - g) * n;
            // Query row i is head g + i / n of the token in activation row row_of(i).
            const auto row_of = [&](int i) { return b * count_ + first + i % n; };
            const auto column_of = [&](int i) { return (kv_head * group + g + i / n) * d; };
            for (int i = 0; i < rows; i++) {
                float* q = buffers_.q.row(row_of(i)) + column_of(i);
                rotate(worker, q, l.q_norm, std::max(position(row_of(i)), 0));
                worker.kernels.narrow(q, kBFloat16, d, queries.rounded + i * queries.stride);
            }
            worker.kernels.gemm_nt(keys, 0, filled, queries.rounded, queries.stride, rows, scores.data, scores.stride,
                                nullptr, {});
            for (int i = 0; i < rows; i++) {
                const int seen = std::max(position(row_of(i)) + 1, 0);
                if (seen) worker.kernels.softmax(scores.row(i), seen, m_.scale);
                std::fill(scores.row(i) + seen, scores.row(i) + filled, 0.0f);
            }
            round_columns(worker.kernels, scores, 0, filled, filled, rows);
            worker.kernels.gemm_nn(values, scores.rounded, scores.stride, rows, queries.data, queries.stride);
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
    bool decode_;
    std::vector<Sequence> sequences_;
    Buffers buffers_;
    std::vector<WorkerBuffers> worker_buffers_;
};

}  // namespace
}  // namespace neuronmm

int neuronmm_reads_prompts(const neuronmm::Model* model) {
    using namespace neuronmm;
    const auto fits = [](const Matrix& m) { return !m.data || m.type != kFloat32; };
    bool all = active().gemm_nt && model->cache_type == kBFloat16 && fits(model->head.a) && fits(model->head.b);
    for (int i = 0; i < model->layers; i++) {
        const Layer& l = model->layer[i];
        for (const Linear* linear : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down})
            all = all && fits(linear->a) && fits(linear->b);
    }
    return all;
}

namespace {

using neuronmm::Sequence;

// The sequences of a static batch: each lane holds one, and all have the same next slot.
std::vector<Sequence> batch_of(const neuronmm::Model& model, const int32_t* starts, int slot) {
    std::vector<Sequence> sequences;
    for (int b = 0; b < model.batch; b++) sequences.push_back({b, starts[b], slot});
    return sequences;
}

// Whether the tokens, lanes and slots are in range, each sequence has a lane of its own, and the tokens from `first` on
// need a slot that their sequence has begun at.
bool fits(const neuronmm::Model& model, const int64_t* tokens, int count, const std::vector<Sequence>& sequences,
          int first) {
    if (count < 1 || sequences.empty() || sequences.size() > neuronmm::kMaxBatch) return false;
    std::vector<bool> taken(model.batch);
    for (const Sequence& of : sequences) {
        if (of.lane < 0 || of.lane >= model.batch || taken[of.lane]) return false;
        if (of.slot < 0 || of.slot > model.max_len - count || of.start < 0 || of.start > of.slot + first) return false;
        taken[of.lane] = true;
    }
    for (size_t i = 0; i < sequences.size() * count; i++)
        if (tokens[i] < 0 || tokens[i] >= model.embedding.rows) return false;
    return true;
}

// Run one decode step, with the logits of every token.
int decode(const neuronmm::Model& model, const int64_t* tokens, int count, std::vector<Sequence> sequences,
           float* logits, int threads) {
    if (!fits(model, tokens, count, sequences, 0)) return -1;
    const neuronmm::Step step(model, tokens, count, count, true, std::move(sequences), logits, threads);
    neuronmm::run_team(threads, [&](const neuronmm::Worker& worker) { step.run(worker); });
    return 0;
}

}  // namespace

int neuronmm_step(const neuronmm::Model* model, const int64_t* tokens, int32_t count, const int32_t* starts,
                  int32_t slot, float* logits, int32_t threads) {
    if (!fits(*model, tokens, count, batch_of(*model, starts, slot), count - 1)) return -1;
    if (count > 1 && !neuronmm_reads_prompts(model)) return -1;
    const int most = std::max(1, neuronmm::kPrefillRows / model->batch);
    for (int done = 0, n; done < count; done += n) {
        // The last step takes up to kMaxBatch rows more. Alone they would go through GEMVs, which round in another way.
        const int left = count - done;
        n = left <= most + neuronmm::kMaxBatch / model->batch ? left : most;
        const neuronmm::Step step(*model, tokens + done, count, n, n == 1, batch_of(*model, starts, slot + done),
                                  done + n == count ? logits : nullptr, threads);
        neuronmm::run_team(threads, [&](const neuronmm::Worker& worker) { step.run(worker); });
    }
    return 0;
}

int neuronmm_verify(const neuronmm::Model* model, const int64_t* tokens, int32_t count, const int32_t* starts,
                    int32_t slot, float* logits, int32_t threads) {
    if (count > neuronmm::kMaxBatch / model->batch) return -1;
    return decode(*model, tokens, count, batch_of(*model, starts, slot), logits, threads);
}

int neuronmm_step_lanes(const neuronmm::Model* model, const int64_t* tokens, int32_t count, const int32_t* lanes,
                        const int32_t* slots, float* logits, int32_t threads) {
    std::vector<Sequence> sequences;
    for (int i = 0; i < count; i++) sequences.push_back({lanes[i], 0, slots[i]});
    return decode(*model, tokens, 1, std::move(sequences), logits, threads);
}
