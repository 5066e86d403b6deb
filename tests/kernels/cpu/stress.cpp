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
#include <random>
#include <vector>

#include "../../../kernels/cpu/blocks.h"

using namespace neuronmm;

namespace {

std::mt19937 random_bits(7);

float draw() { return std::uniform_real_distribution<float>(-1, 1)(random_bits); }

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
        if (type == kInt8) {
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
        if (type == kInt8) {
            scale = floats(rows);
            for (int i = 0; i < rows; i++) scale[i] /= 127;
        }
        return {values(type, static_cast<size_t>(rows) * cols), scale, rows, cols, type};
    }

    Linear linear(Type type, int out, int in, int rank) {
        float* bias = floats(out);
        if (!rank) return {matrix(type, out, in), {}, bias};
        return {matrix(type, rank, in), matrix(type, out, rank), bias};
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

// Logits of a few steps of a model of this weight type, batch and rank (0: dense). `shared`: q and v share one A, and
// so do gate and up of the first layer.
std::vector<float> decode(Type type, Type cache, int batch, int rank, bool shared, int threads) {
    random_bits.seed(11);
    Memory memory;
    const int hidden = 37, heads = 6, kv_heads = 2, head_dim = 10, intermediate = 275, vocab = 53, max_len = 21;
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
                      0.3f,  memory.matrix(type, vocab, hidden),
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
    tokens[0] = vocab;
    if (!neuronmm_step(&model, tokens.data(), 1, starts.data(), 5, logits.data(), threads)) return {};
    return all;
}

// The bytes of both ops' results. One worker computes each row, so they must not depend on the number of threads at
// all.
std::vector<char> low_rank(Type type, int batch, bool shared, int threads) {
    random_bits.seed(13);
    Memory memory;
    const int hidden = 67, intermediate = 131;
    const Linear gate = memory.linear(type, intermediate, hidden, 9);
    Linear up = memory.linear(type, intermediate, hidden, shared ? 9 : 33);
    if (shared) up.a = gate.a;
    const Linear down = memory.linear(type, hidden, intermediate, 17);
    const size_t size = type == kFloat32 ? 4 : 2;
    void* x = memory.values(type, static_cast<size_t>(batch) * hidden);
    std::vector<char> y(batch * (hidden + intermediate) * size);
    neuronmm_low_rank_swiglu(&gate, &up, &down, x, type, batch, y.data(), threads);
    neuronmm_low_rank_linear(&gate, x, type, batch, y.data() + batch * hidden * size, threads);
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

// Every item of a phase is visited once, although one worker starts with all of them and the others steal.
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
    for (const char* isa : {"avx512bf16", "avx512bf16+fp32", "avx512", "avx2", "portable"}) {
        if (neuronmm_set_isa(isa)) {
            std::printf("%s: not on this processor\n", isa);
            continue;
        }
        for (const Type type : {kFloat32, kBFloat16, kInt8})
            for (int batch = 1; batch <= kMaxBatch; batch++)
                for (const int threads : {2, 3}) {
                    for (const int rank : {0, 5, 19}) {
                        const Type cache = batch % 2 ? kFloat32 : kBFloat16;
                        const bool shared = rank == 5;
                        const auto one = decode(type, cache, batch, rank, shared, 1);
                        if (!one.empty() && close(decode(type, cache, batch, rank, shared, threads), one)) continue;
                        std::printf("%s: step: type %d batch %d rank %d threads %d\n", isa, type, batch, rank, threads);
                        failures++;
                    }
                    if (!multiplies_shared_a_once(type, batch, threads)) {
                        std::printf("%s: shared: type %d batch %d threads %d\n", isa, type, batch, threads);
                        failures++;
                    }
                    for (const bool shared : {false, true}) {
                        if (type == kInt8) continue;
                        if (low_rank(type, batch, shared, threads) == low_rank(type, batch, shared, 1)) continue;
                        std::printf("%s: low rank: type %d batch %d threads %d\n", isa, type, batch, threads);
                        failures++;
                    }
                }
        std::printf("%s: done\n", isa);
    }
    std::printf("%d failures\n", failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
