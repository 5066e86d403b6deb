// Run every entry point of the CPU core on small random models, for the sanitizers and for processors without Python:
// every instruction set, weight type and batch, prompts where the core reads them, one to three threads, shapes with
// many tails. Buffers have their exact sizes. The number of threads must not change a result beyond the order of
// summation.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <vector>

#include "../../../kernels/cpu/blocks.h"

using namespace neuronmm;

namespace {

std::mt19937 random_bits(7);

float draw() { return std::uniform_real_distribution<float>(-1, 1)(random_bits); }

bool integers(Type type) { return type != kFloat32 && type != kBFloat16; }

// Owns the memory that the structs point at.
struct Memory {
    std::deque<std::vector<char>> blocks;

    void* bytes(size_t n) { return blocks.emplace_back(n).data(); }

    float* floats(size_t n, float offset = 0) {
        float* p = static_cast<float*>(bytes(n * sizeof(float)));
        for (size_t i = 0; i < n; i++) p[i] = draw() + offset;
        return p;
    }

    void* values(Type type, size_t n) {
        if (type == kFloat32) return floats(n);
        if (integers(type)) {
            int8_t* p = static_cast<int8_t*>(bytes(n));
            for (size_t i = 0; i < n; i++) p[i] = static_cast<int8_t>(127 * draw());
            return p;
        }
        uint16_t* p = static_cast<uint16_t*>(bytes(2 * n));
        for (size_t i = 0; i < n; i++) {
            const float value = draw();
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            p[i] = static_cast<uint16_t>(bits >> 16);
        }
        return p;
    }

    Matrix matrix(Type type, int rows, int cols) {
        float* scale = nullptr;
        if (integers(type)) {
            scale = floats(rows);
            for (int i = 0; i < rows; i++) scale[i] /= 127;
        }
        Matrix matrix{nullptr, scale, rows, cols, type};
        const int stored = (rows + matrix.tile() - 1) / matrix.tile() * matrix.tile();
        const size_t n = type == kInt4 ? stored * matrix.row_bytes() : static_cast<size_t>(rows) * cols;
        matrix.data = values(type, n);
        if (type == kInt4)
            for (int i = 0; i < rows; i++) scale[i] /= 30;
        return matrix;
    }

    // Factors and embeddings beside int4 linears are int8.
    Matrix factor(Type type, int rows, int cols) { return matrix(type == kInt4 ? kInt8x16 : type, rows, cols); }

    Linear linear(Type type, int out, int in, int rank) {
        float* bias = floats(out);
        if (!rank) return {matrix(type, out, in), {}, bias, nullptr, 0, kTwo};
        return {factor(type, rank, in), factor(type, out, rank), bias, nullptr, 0, kTwo};
    }

    Linear column_form(Type type, int out, int in, int rank) {
        return {factor(type, rank, in - rank), factor(type, out, rank), floats(out), nullptr, 0, kColumns};
    }

    // Every other output is a pivot where there are enough outputs; as a tensor or, of `first` or more, as a range.
    Linear row_form(Type type, int out, int in, int rank, int first = -1) {
        Linear linear{factor(type, rank, in), factor(type, out - rank, rank), floats(out), nullptr, first, kRows};
        if (first >= 0) return linear;
        int32_t* pivots = static_cast<int32_t*>(bytes(rank * sizeof(int32_t)));
        for (int i = 0; i < rank; i++) pivots[i] = std::min(2 * i + 1, out - rank + i);
        linear.pivots = pivots;
        return linear;
    }
};

bool close(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return false;
    float worst = 0, largest = 0;
    for (size_t i = 0; i < a.size(); i++) {
        if (!std::isfinite(a[i])) return false;
        worst = std::max(worst, std::fabs(a[i] - b[i]));
        largest = std::max(largest, std::fabs(a[i]));
    }
    return worst <= 1e-4f * largest;
}

// Logits of a few steps of a model of this weight type, batch and rank (0: dense). `shared`: q and v have one A in
// common, as have gate and up of the first layer. `pivoted`: both row forms and the column form.
std::vector<float> decode(Type type, Type cache, int batch, int rank, bool shared, bool pivoted, int threads) {
    random_bits.seed(11);
    Memory memory;
    const int hidden = 37, heads = 14, kv_heads = 2, head_dim = 70, intermediate = 275, vocab = 53, max_len = 21;
    const int q_size = heads * head_dim, kv_size = kv_heads * head_dim;
    std::vector<Layer> layers;
    for (int i = 0; i < 2; i++) {
        const size_t cached = static_cast<size_t>(batch) * kv_heads * max_len * head_dim * (cache == kFloat32 ? 4 : 2);
        Layer layer{};
        layer.input_norm = memory.floats(hidden, 1);
        layer.post_norm = memory.floats(hidden, 1);
        layer.q_norm = i ? memory.floats(head_dim, 1) : nullptr;
        layer.k_norm = i ? memory.floats(head_dim, 1) : nullptr;
        layer.q = memory.linear(type, q_size, hidden, rank);
        layer.k = memory.linear(type, kv_size, hidden, 0);
        layer.v = memory.linear(type, kv_size, hidden, rank);
        layer.o = memory.linear(type, hidden, q_size, rank);
        layer.gate = memory.linear(type, intermediate, hidden, rank);
        layer.up = memory.linear(type, intermediate, hidden, i ? 0 : rank);
        layer.down = memory.linear(type, hidden, intermediate, rank);
        if (pivoted) {
            layer.q = memory.row_form(type, q_size, hidden, rank);
            layer.o = i ? memory.column_form(type, hidden, q_size, rank) : memory.row_form(type, hidden, q_size, rank);
            layer.gate = memory.row_form(type, intermediate, hidden, rank, i ? intermediate - rank : 70);
            layer.down = memory.column_form(type, hidden, intermediate, rank);
        }
        if (shared && rank) layer.v.a = layer.q.a;
        if (shared && rank && !i) layer.up.a = layer.gate.a;
        layer.keys = memory.bytes(cached);
        layer.values = memory.bytes(cached);
        layers.push_back(layer);
    }
    const Model model{2,     hidden,
                      heads, kv_heads,
                      head_dim, intermediate,
                      batch, max_len,
                      cache, 1e-5f,
                      0.3f,  memory.factor(type, vocab, hidden),
                      memory.linear(type, vocab, hidden, 0), memory.floats(hidden, 1),
                      memory.floats(max_len * head_dim), memory.floats(max_len * head_dim),
                      layers.data()};
    std::vector<int32_t> starts(batch);
    std::vector<int64_t> tokens(batch);
    std::vector<float> all, logits(static_cast<size_t>(batch) * vocab);
    for (int b = 0; b < batch; b++) starts[b] = b % 3;
    const int prompt = neuronmm_reads_prompts(&model) ? 9 : 0;
    if (prompt) {
        std::vector<int64_t> words(batch * prompt);
        for (int i = 0; i < batch * prompt; i++) words[i] = i * 5 % vocab;
        if (neuronmm_step(&model, words.data(), prompt, starts.data(), 0, logits.data(), threads)) return {};
        all = logits;
    }
    for (int slot = std::max(prompt, 2); slot < max_len; slot++) {
        for (int b = 0; b < batch; b++) tokens[b] = (slot * 7 + b) % vocab;
        if (neuronmm_step(&model, tokens.data(), 1, starts.data(), slot, logits.data(), threads)) return {};
        all.insert(all.end(), logits.begin(), logits.end());
    }
    // The last tokens again, several in a step: the same logits, bit by bit.
    const int count = kMaxBatch / batch;
    std::vector<int64_t> words(batch * count);
    std::vector<float> each(static_cast<size_t>(batch) * count * vocab);
    for (int i = 0; i < batch * count; i++) words[i] = ((max_len - count + i % count) * 7 + i / count) % vocab;
    if (neuronmm_verify(&model, words.data(), count, starts.data(), max_len - count, each.data(), threads)) return {};
    for (int i = 0; i < batch * count; i++) {
        const size_t steps_from_end = count - i % count;
        const float* alone = all.data() + all.size() - (steps_from_end * batch - i / count) * vocab;
        if (std::memcmp(alone, each.data() + static_cast<size_t>(i) * vocab, vocab * sizeof(float))) return {};
    }
    // The last tokens of the rows that begin at slot 0, as sequences of their own, in another order.
    std::vector<int32_t> lanes, slots;
    for (int b = (batch - 1) / 3 * 3; b >= 0; b -= 3) {
        tokens[lanes.size()] = ((max_len - 1) * 7 + b) % vocab;
        lanes.push_back(b);
        slots.push_back(max_len - 1);
    }
    const int rows = static_cast<int>(lanes.size());
    if (neuronmm_step_lanes(&model, tokens.data(), rows, lanes.data(), slots.data(), logits.data(), threads)) return {};
    for (int i = 0; i < rows; i++) {
        const float* together = all.data() + all.size() - static_cast<size_t>(batch - lanes[i]) * vocab;
        if (std::memcmp(together, logits.data() + static_cast<size_t>(i) * vocab, vocab * sizeof(float))) return {};
    }
    lanes[0] = batch;
    if (!neuronmm_step_lanes(&model, tokens.data(), rows, lanes.data(), slots.data(), logits.data(), threads)) return {};
    if (!neuronmm_verify(&model, words.data(), count + 1, starts.data(), 0, each.data(), threads)) return {};
    tokens[0] = vocab;
    if (!neuronmm_step(&model, tokens.data(), 1, starts.data(), 5, logits.data(), threads)) return {};
    return all;
}

// The bytes of both ops' results: every row is one worker's, so they do not depend on the number of threads at all.
std::vector<char> low_rank(Type type, int batch, bool shared, bool pivoted, int threads) {
    random_bits.seed(13);
    Memory memory;
    const int hidden = 67, intermediate = 131;
    const Linear gate = pivoted ? memory.row_form(type, intermediate, hidden, 9)
                                : memory.linear(type, intermediate, hidden, 9);
    Linear up = memory.linear(type, intermediate, hidden, shared ? 9 : 33);
    if (shared) up.a = gate.a;
    const Linear down = pivoted ? memory.column_form(type, hidden, intermediate, 17)
                                : memory.linear(type, hidden, intermediate, 17);
    const size_t size = type == kFloat32 ? 4 : 2;
    void* x = memory.values(type, static_cast<size_t>(batch) * hidden);
    std::vector<char> y(batch * (hidden + intermediate) * size);
    neuronmm_low_rank_swiglu(&gate, &up, &down, x, type, batch, y.data(), threads);
    neuronmm_low_rank_linear(&gate, x, type, batch, y.data() + batch * hidden * size, threads);
    return y;
}

// The bytes of a prompt's rows, whose number leaves every tail of a GEMM's blocks; they do not depend on the threads.
std::vector<char> prompt_rows(Type type, int rows, int threads) {
    random_bits.seed(19);
    Memory memory;
    const int in = 67, out = 131;
    const Linear linear = memory.linear(type, out, in, 0);
    std::vector<char> y(static_cast<size_t>(rows) * out * 2);
    const void* x = memory.values(kBFloat16, static_cast<size_t>(rows) * in);
    neuronmm_linear_group(&linear, 1, x, kBFloat16, rows, in, y.data(), out, threads);
    return y;
}

// The first and the last of three linears share one A: the results equal those of separate copies, A x is computed once
// (the last linear's intermediate does not change), and the order does not matter.
bool multiplies_shared_a_once(Type type, int batch, int threads) {
    random_bits.seed(17);
    Memory memory;
    const int in = 45, out = 23, rank = 11;
    Linear one = memory.linear(type, out, in, rank), two = memory.linear(type, out, in, rank);
    Linear three = memory.linear(type, out, in, rank);
    const float untouched = 12345;
    const Rows x{memory.floats(static_cast<size_t>(batch) * in), static_cast<size_t>(in)};
    std::vector<std::vector<float>> results;
    for (const bool shared : {false, true}) {
        std::vector<char> bytes(static_cast<size_t>(rank) * in * (type == kFloat32 ? 4 : type == kBFloat16 ? 2 : 1));
        std::memcpy(bytes.data(), one.a.data, bytes.size());
        three.a = one.a;
        if (!shared) three.a.data = bytes.data();
        std::vector<float> middles[3], ys[3];
        Rows m[3], y[3];
        for (int i = 0; i < 3; i++) {
            middles[i].assign(static_cast<size_t>(batch) * rank, untouched);
            ys[i].assign(static_cast<size_t>(batch) * out, untouched);
            m[i] = {middles[i].data(), static_cast<size_t>(rank)};
            y[i] = {ys[i].data(), static_cast<size_t>(out)};
        }
        run_team(threads, [&](const Worker& worker) {
            project(worker, {{one, m[0], y[0]}, {two, m[1], y[1]}, {three, m[2], y[2]}}, x, batch);
        });
        if (std::all_of(middles[2].begin(), middles[2].end(), [&](float v) { return v == untouched; }) != shared)
            return false;
        for (const auto& each : ys) results.push_back(each);
    }
    return results[0] == results[3] && results[1] == results[4] && results[2] == results[5];
}

// The outputs of a linear of random pivots are those of its expansion: the same A, and B with rows of the identity.
bool expands(Type type, int batch, int threads) {
    random_bits.seed(19);
    Memory memory;
    const int in = 29, out = 150;
    const size_t size = type == kBFloat16 ? 2 : 4;
    for (const int rank : {1, 8, 75, 149, 150}) {
        for (const int first : {-1, 0, out - rank, (out - rank) / 2}) {
            const Linear pivoted = memory.row_form(type, out, in, rank, first);
            Linear plain = pivoted;
            plain.form = kTwo;
            plain.b = memory.matrix(type, out, rank);
            char* to = static_cast<char*>(const_cast<void*>(plain.b.data));
            const char* from = static_cast<const char*>(pivoted.b.data);
            for (int i = 0, pivot = 0; i < out; i++, to += rank * size) {
                const int next = pivot == rank ? out : first < 0 ? pivoted.pivots[pivot] : first + pivot;
                if (i != next) {
                    std::memcpy(to, from, rank * size), from += rank * size;
                    continue;
                }
                const float one = 1;
                std::memset(to, 0, rank * size);
                std::memcpy(to + pivot++ * size, reinterpret_cast<const char*>(&one) + 4 - size, size);
            }
            if (!neuronmm_pivots_fit(&pivoted)) return false;
            const void* x = memory.values(kFloat32, static_cast<size_t>(batch) * in);
            std::vector<float> y(batch * out), expected(batch * out);
            neuronmm_low_rank_linear(&pivoted, x, kFloat32, batch, y.data(), threads);
            neuronmm_low_rank_linear(&plain, x, kFloat32, batch, expected.data(), threads);
            // A plain linear rounds h to bf16 where the processor multiplies bf16.
            const float bound = type == kBFloat16 ? 1.0f / 128 : 1e-6f;
            for (size_t i = 0; i < y.size(); i++)
                if (!(std::fabs(y[i] - expected[i]) <= bound * (std::fabs(expected[i]) + 1))) return false;
        }
    }
    return true;
}

// Pivots that are not strictly increasing outputs are seen.
bool sees_hostile_pivots() {
    Memory memory;
    Linear linear = memory.row_form(kFloat32, 12, 8, 4);
    if (!neuronmm_pivots_fit(&linear)) return false;
    const int32_t lowest = std::numeric_limits<int32_t>::min(), highest = std::numeric_limits<int32_t>::max();
    for (const auto& bad : std::vector<std::vector<int32_t>>{
             {0, 2, 1, 3}, {0, 1, 1, 3}, {-1, 1, 2, 3}, {0, 1, 2, 12}, {0, 1, 2, highest}, {lowest, 1, 2, 3}}) {
        linear.pivots = bad.data();
        if (neuronmm_pivots_fit(&linear)) return false;
    }
    linear.pivots = nullptr;
    for (const int32_t bad : {-1, 9, lowest, highest}) {
        linear.first = bad;
        if (neuronmm_pivots_fit(&linear)) return false;
    }
    return true;
}

// Every item of a phase is visited once, though all of them begin as one worker's and the others take from it.
bool visits_each_once(int threads) {
    const int phases = 40;
    std::vector<int> visits(5000);
    run_team(threads, [&](const Worker& worker) {
        for (int phase = 0; phase < phases; phase++) {
            const int items = phase % worker.count == worker.id ? static_cast<int>(visits.size()) : 0;
            worker.each(0, items, 7, [&](int first, int end) {
                for (int i = first; i < end; i++) visits[i]++;
            });
            worker.sync();
        }
    });
    return std::all_of(visits.begin(), visits.end(), [&](int n) { return n == phases; });
}

}  // namespace

int main() {
    int failures = 0;
    for (const int threads : {1, 2, 3})
        if (!visits_each_once(threads)) {
            std::printf("items: threads %d\n", threads);
            failures++;
        }
    if (!sees_hostile_pivots()) {
        std::printf("hostile pivots\n");
        failures++;
    }
    for (const char* isa : {"avx512bf16+amx", "avx512bf16", "avx512bf16+fp32", "avx512", "avx2", "portable"}) {
        if (neuronmm_set_isa(isa)) {
            std::printf("%s: not on this processor\n", isa);
            continue;
        }
        for (const Type type : {kFloat32, kBFloat16, kInt8, kInt8x16, kInt4})
            for (int batch = 1; batch <= kMaxBatch; batch++)
                for (const int threads : {2, 3}) {
                    for (const int rank : {0, 5, 19})
                        for (const bool pivoted : {false, true}) {
                            if (pivoted && !rank) continue;
                            const Type cache = batch % 2 ? kFloat32 : kBFloat16;
                            const bool shared = rank == 5;
                            const auto one = decode(type, cache, batch, rank, shared, pivoted, 1);
                            if (!one.empty() && close(decode(type, cache, batch, rank, shared, pivoted, threads), one))
                                continue;
                            std::printf("%s: step: type %d batch %d rank %d pivoted %d threads %d\n", isa, type, batch,
                                        rank, pivoted, threads);
                            failures++;
                        }
                    if (!integers(type) && !expands(type, batch, threads)) {
                        std::printf("%s: expansion: type %d batch %d threads %d\n", isa, type, batch, threads);
                        failures++;
                    }
                    if (!multiplies_shared_a_once(type, batch, threads)) {
                        std::printf("%s: shared: type %d batch %d threads %d\n", isa, type, batch, threads);
                        failures++;
                    }
                    if (prompt_rows(type, 16 + batch, threads) != prompt_rows(type, 16 + batch, 1)) {
                        std::printf("%s: prompt: type %d rows %d threads %d\n", isa, type, 16 + batch, threads);
                        failures++;
                    }
                    for (const bool shared : {false, true})
                        for (const bool pivoted : {false, true}) {
                            if (integers(type)) continue;
                            if (low_rank(type, batch, shared, pivoted, threads) ==
                                low_rank(type, batch, shared, pivoted, 1))
                                continue;
                            std::printf("%s: low rank: type %d batch %d pivoted %d threads %d\n", isa, type, batch,
                                        pivoted, threads);
                            failures++;
                        }
                }
        std::printf("%s: done\n", isa);
    }
    std::printf("%d failures\n", failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
