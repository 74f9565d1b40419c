// The command line of a program that decodes: prompts are continued by the largest logit, whole or in parts, then a token at a
// time. Lengths, tokens and caches are states of the GPU, which both programs share.
#include "decode.hpp"

#include "handover.hpp"
#include "options.hpp"

namespace ithaca {

static constexpr const char* kDecodeHelp =
    "usage: %s [options]\n"
    "  --weights PATH       safetensors file, or a directory of them; may be given again\n"
    "  --inputs PATH        safetensors file of prompts: prompt_ids [sequence token] and prompt_lengths [sequence]\n"
    "  --random-weights N   weights (and prompts, when none are given) from seed N\n"
    "  --output PATH        write tokens [sequence step] and step_logits [sequence step vocabulary] on rank 0\n"
    "  --self-check         let one GPU continue the same tokens and compare the logits of every step; exit 1 when they differ\n"
    "  --tolerance X        largest relative error of the self-check\n"
    "  --steps N            decode N tokens after the one that follows the prompt, and print the time of each; default 1\n"
    "  --graph              launch steps of a kind from the second on as a CUDA graph, except one that is measured\n"
    "  --profile            measure the tasks of the last step; print rank 0's, and the rate at which it sent\n"
    "  --trace PREFIX       measure the last step and write PREFIX.RANK.json, for Chrome or Perfetto\n"
    "  --timeout SECONDS    end when ranks wait for each other, or for a task, for longer; default 600\n"
    "example: torchrun --no-python --nproc-per-node 8 %s --weights model.safetensors --inputs prompts.safetensors --steps 64\n";

// The inputs that have the number of new tokens of each sequence, their ids and the table of pages, and the state that has the
// last tokens.
static constexpr const char *kNewTokens = "new_tokens", *kIds = "input_ids", *kPages = "pages", *kLastToken = "cache.token";

static const Source& source_named(const Program& program, const std::string& name) {
    for (const Source& source : program.sources) if (source.name == name) return source;
    throw Error("the program has no `" + name + "`");
}

// Token ids of each sequence.
class Prompts {
  public:
    // Random ones have at most `room` tokens.
    Prompts(const Continuing& programs, const Tensors& tensors, int64_t room) {
        const Source& input = source_named(programs.prompts, kIds);
        const std::vector<int64_t>& shape = input.stored_shape();
        const int64_t batch = source_named(programs.token, kNewTokens).stored_shape()[0];
        chunk = shape[1];
        if (tensors.inputs.empty()) {
            if (tensors.seed < 0) throw Error("prompts are needed: --inputs FILE");
            const auto id = initial_elements(input, 0, tensors);
            for (int64_t row = 0; row < batch; ++row) {
                ids.emplace_back();
                for (int64_t i = 0; i < std::min(chunk, std::max<int64_t>(room, 1)); ++i)
                    ids.back().push_back(static_cast<int32_t>(element_at(id, row * chunk + i)));
            }
            return;
        }
        const StoredTensor &all = stored(tensors, "prompt_ids", 2), &lengths = stored(tensors, "prompt_lengths", 1);
        const int64_t rows = all.shape[0], width = all.shape[1];
        if (rows != batch || lengths.shape[0] != rows)
            throw Error("prompt_ids " + show(all.shape) + " and prompt_lengths " + show(lengths.shape) + " are not " +
                        std::to_string(batch) + " sequences, for which the program was emitted");
        for (int64_t row = 0; row < rows; ++row) {
            const auto length = static_cast<int64_t>(load_element(lengths.dtype, lengths.data, row));
            if (length < 1 || length > width)
                throw Error("a prompt of " + std::to_string(length) + " tokens among prompt_ids " + show(all.shape));
            ids.emplace_back();
            for (int64_t i = 0; i < length; ++i) ids.back().push_back(id_at(all, row * width + i, input.below));
        }
    }

    int64_t longest() const { return longest(0, static_cast<int64_t>(ids.size())); }
    int64_t longest(int64_t first, int64_t n) const {
        size_t most = 0;
        for (int64_t row = first; row < first + n; ++row) most = std::max(most, ids[row].size());
        return static_cast<int64_t>(most);
    }

    int64_t chunk;  // tokens of a step
    std::vector<std::vector<int32_t>> ids;

  private:
    static const StoredTensor& stored(const Tensors& tensors, const std::string& name, size_t dims) {
        const StoredTensor* const found = tensors.inputs.find(name);
        if (found == nullptr) throw Error("tensor `" + name + "` is not in the file of inputs");
        if (found->shape.size() != dims || (found->dtype != DType::I64 && found->dtype != DType::I32))
            throw Error("tensor `" + name + "` " + show(found->shape) + " is no list of integers of " + std::to_string(dims) + " dimensions");
        return *found;
    }
    static int32_t id_at(const StoredTensor& all, int64_t i, int64_t bound) {
        const auto id = static_cast<int64_t>(load_element(all.dtype, all.data, i));
        if (id < 0 || id >= bound)
            throw Error("tensor `prompt_ids` holds " + std::to_string(id) + " at " + std::to_string(i) +
                        ", but the model needs integers from 0 and below " + std::to_string(bound));
        return static_cast<int32_t>(id);
    }
};

// The pages of each sequence [sequence entry], -1 where it has none yet: a sequence is given pages as it grows.
class PageTable {
  public:
    // Pages of the smaller groups of sequences are those of the larger ones, too.
    PageTable(const Continuing& programs, int64_t batch)
        : pages_(programs.prompts.pages.groups > programs.token.pages.groups ? programs.prompts.pages : programs.token.pages), given_(pages_.groups), lengths_(batch) {
        if (pages_.tokens == 0) return;
        shape_ = source_named(programs.token, kPages).stored_shape();
        table_.assign(shape_[0] * shape_[1], -1);
    }
    // Gives sequences pages for so many more tokens each, and the table to a step.
    void grow(const std::vector<int32_t>& more, Tensors& inputs) {
        if (pages_.tokens == 0) return;
        const auto batch = static_cast<int64_t>(more.size()), each = pages_.count / pages_.groups;
        const int64_t of_host = pages_.host / pages_.groups;
        for (int64_t i = 0; i < batch; ++i) {
            const int64_t group = i * pages_.groups / batch, had = pages_of(lengths_[i]);
            lengths_[i] += more[i];
            for (int64_t entry = had; entry < pages_of(lengths_[i]); ++entry) {
                if (given_[group] == each + of_host)
                    throw Error("the sequences need more than " + std::to_string(pages_.count + pages_.host) + " pages of " +
                                std::to_string(pages_.tokens) + " tokens, for which the program was emitted");
                const int64_t own = given_[group]++;
                const int64_t page = own < each ? group * each + own : pages_.count + group * of_host + own - each;
                table_[i * shape_[1] + entry] = static_cast<int32_t>(page);
            }
        }
        inputs.inputs.set(kPages, shape_, table_);
    }

  private:
    int64_t pages_of(int64_t length) const { return (length + pages_.tokens - 1) / pages_.tokens; }

    Pages pages_;
    std::vector<int64_t> given_, lengths_, shape_;  // pages that a group was given, tokens of a sequence
    std::vector<int32_t> table_;
};

// By sequence, the next token after every step that continued it, and its logits; on rank 0.
struct Generated {
    std::vector<std::vector<double>> tokens, logits;
};

// One GPU's run of both programs.
class Decoder : NotCopied {
  public:
    // Of a rank of prompts and of one of tokens; a negative one has no device.
    Decoder(const Continuing& programs, const int64_t (&ranks)[2], const Communicators& communicators, const Communicators& of_prompts,
            const Tensors& tensors, double seconds)
        : programs_(programs) {
        if (ranks[0] >= 0) prompts_.emplace(programs.prompts, ranks[0], of_prompts, tensors, seconds);
        if (ranks[1] >= 0) token_.emplace(programs.token, ranks[1], communicators, tensors, seconds, prompts_ ? &*prompts_ : nullptr);
    }

    int64_t bytes() const { return (prompts_ ? prompts_->bytes() : 0) + (token_ ? token_->bytes() : 0); }
    Device* token() { return token_ ? &*token_ : nullptr; }

    // Calls run(device, kind, number) for each step of prompts, then for `steps` steps of a token: of those that were chosen, or
    // of those that are given. States are moved between the two.
    template <typename Run>
    void generate(const Prompts& prompts, int64_t steps, bool has_logits, const Generated* given, StateMover* mover, const Run& run) {
        const auto batch = static_cast<int64_t>(prompts.ids.size());
        generated = {std::vector<std::vector<double>>(batch), std::vector<std::vector<double>>(batch)};
        PageTable pages(programs_, batch);
        const int64_t rounds = mover != nullptr ? programs_.handover->rounds : 1, each = batch / rounds;
        for (int64_t round = 0, first = 0; round < rounds; ++round, first += each) {
            for (int64_t start = 0; start < prompts.longest(first, each); start += prompts.chunk) {
                std::vector<int32_t> ids, more;
                std::vector<bool> ends(batch);
                for (int64_t row = first; row < first + each; ++row) {
                    const std::vector<int32_t>& sequence = prompts.ids[row];
                    const int64_t left = std::max<int64_t>(static_cast<int64_t>(sequence.size()) - start, 0);
                    more.push_back(static_cast<int32_t>(std::min(left, prompts.chunk)));
                    ends[row] = left > 0 && left <= prompts.chunk;
                    for (int64_t i = 0; i < prompts.chunk; ++i) ids.push_back(i < left ? sequence[start + i] : 0);
                }
                Tensors inputs;
                inputs.inputs.set(kIds, {each, prompts.chunk}, ids);
                inputs.inputs.set(kNewTokens, {each}, more);
                pages.grow(more, inputs);
                if (!prompts_) continue;
                prompts_->read_inputs(inputs);
                run(*prompts_, "prompts", start / prompts.chunk + round);
                add(*prompts_, ends, first, has_logits);
            }
            if (mover == nullptr) continue;
            mover->run(round, prompts.longest(first, each), prompts_ ? &*prompts_ : nullptr, token());
            if (prompts_ && rounds > 1) prompts_->clear_states();
        }
        if (mover != nullptr) {
            const auto& [of_prompts, of_tokens] = programs_.handover->processes;
            for (auto* const rows : {&generated.tokens, &generated.logits})
                for (std::vector<double>& row : *rows) mover->send(of_prompts[0], of_tokens[0], row);
        }
        if (!token_) return;
        const std::vector<int32_t> one(batch, 1);
        Tensors inputs;
        inputs.inputs.set(kNewTokens, {batch}, one);
        for (int64_t step = 0; step < steps; ++step) {
            pages.grow(one, inputs);
            if (step == 0 || programs_.token.pages.tokens > 0) token_->read_inputs(inputs);
            if (given != nullptr) {
                std::vector<int32_t> last;
                for (const auto& tokens : given->tokens) last.push_back(static_cast<int32_t>(tokens[step]));
                token_->write(kLastToken, last);
            }
            run(*token_, "token", step);
            add(*token_, std::vector<bool>(batch, true), 0, has_logits);
        }
    }
    // The tokens and logits of all steps.
    std::vector<HostTensor> outputs() const {
        const auto batch = static_cast<int64_t>(generated.tokens.size()), steps = static_cast<int64_t>(generated.tokens.front().size());
        const auto width = static_cast<int64_t>(generated.logits.front().size()) / steps;
        DType dtype = DType::F32;
        for (const Output& output : programs_.token.outputs) if (std::strcmp(output.name, "logits") == 0) dtype = output.tensor.dtype;
        std::vector<HostTensor> out = {{"tokens", DType::I32, {batch, steps}, {}}, {"step_logits", dtype, {batch, steps, width}, {}}};
        for (int64_t i = 0; i < batch; ++i) {
            out[0].values.insert(out[0].values.end(), generated.tokens[i].begin(), generated.tokens[i].end());
            out[1].values.insert(out[1].values.end(), generated.logits[i].begin(), generated.logits[i].end());
        }
        return out;
    }

    Generated generated;

  private:
    // The token after a step of the sequences from `first` on: of those whose prompt it ends or that it continued.
    void add(Device& device, const std::vector<bool>& ends, int64_t first, bool has_logits) {
        HostTensor tokens, logits;
        for (const Output& output : device.program.outputs) {
            if (std::strcmp(output.name, "token") == 0) tokens = gather_output(device, output);
            if (has_logits && std::strcmp(output.name, "logits") == 0) logits = gather_output(device, output);
        }
        if (device.rank != 0) return;
        const auto width = static_cast<std::ptrdiff_t>(has_logits ? logits.shape.back() : 0);
        for (size_t i = 0; i < ends.size(); ++i) {
            if (!ends[i]) continue;
            const auto at = static_cast<std::ptrdiff_t>(i) - first;
            generated.tokens[i].push_back(tokens.values[at]);
            const auto row = logits.values.begin() + at * width;
            generated.logits[i].insert(generated.logits[i].end(), row, row + width);
        }
    }

    const Continuing& programs_;
    std::optional<Device> prompts_, token_;
};

// The first of the largest numbers of each row.
static HostTensor largest_of_rows(const HostTensor& tokens, const HostTensor& logits) {
    HostTensor out{tokens.name, tokens.dtype, tokens.shape, {}};
    const auto width = static_cast<std::ptrdiff_t>(logits.shape.back());
    for (auto row = logits.values.begin(); row != logits.values.end(); row += width)
        out.values.push_back(static_cast<double>(std::max_element(row, row + width) - row));
    return out;
}

static int decode(const Options& options, const Continuing& programs, const Continuing* reference) {
    const Request request(options, 0);
    Tensors tensors;
    const std::optional<Handover>& handover = programs.handover;
    const int64_t n_processes = handover ? handover->n_processes() : programs.token.mesh.ranks();
    const World self = begin(options, programs.token, n_processes, reference != nullptr, tensors);
    const int64_t capacity = std::min(programs.prompts.capacity, programs.token.capacity);
    const Prompts prompts(programs, tensors, capacity - request.steps);
    if (prompts.longest() + request.steps > capacity)
        throw Error("a prompt of " + std::to_string(prompts.longest()) + " tokens and " + std::to_string(request.steps) +
                    " steps do not fit a cache of " + std::to_string(capacity));
    Communicators all, communicators, of_prompts;
    int64_t ranks[2] = {self.rank, self.rank};
    std::optional<StateMover> mover;
    if (handover) {
        all.open({}, self, request.seconds);
        for (int side = 0; side < 2; ++side) {
            ranks[side] = handover->rank(side, self.rank);
            const Mesh& mesh = (side == 0 ? programs.prompts : programs.token).mesh;
            (side == 0 ? of_prompts : communicators).open(mesh, {ranks[side], mesh.ranks(), self.local_rank}, request.seconds, &all);
        }
        mover.emplace(*handover, self.rank, capacity, all.all[kWorld].comm, request.seconds);
    } else {
        communicators.open(programs.token.mesh, self, request.seconds);
    }
    const bool is_first = ranks[1] == 0;
    const bool has_logits = request.checks || !request.output.empty();
    std::vector<HostTensor> outputs;
    Generated generated;
    {
        Decoder decoder(programs, ranks, communicators, handover ? of_prompts : communicators, tensors, request.seconds);
        if (is_first) print_memory(programs.token, decoder.bytes());
        StateMover* const moves = mover ? &*mover : nullptr;
        decoder.generate(prompts, request.steps, has_logits, nullptr, moves, [&](Device& device, const char* kind, int64_t number) {
            request.run(device, kind, number, &device == decoder.token() && request.measures(number));
        });
        if (decoder.token() != nullptr) request.report(*decoder.token());
        generated = decoder.generated;
        if (is_first) {
            for (size_t i = 0; i < generated.tokens.size(); ++i) {
                std::printf("sequence %zu:", i);
                for (double token : generated.tokens[i]) std::printf(" %.0f", token);
                std::printf("\n");
            }
            if (has_logits) outputs = decoder.outputs();
        }
    }
    bool good = true;
    if (is_first && !request.output.empty()) write_tensors(request.output, outputs);
    if (is_first && request.checks) {
        const Communicators none;
        Decoder decoder(*reference, {0, 0}, none, none, tensors, request.seconds);
        decoder.generate(prompts, request.steps, true, &generated, nullptr, [](Device& device, const char*, int64_t) { device.run(); });
        // Equal logits may round apart, so each token is compared with the logits that it was chosen from.
        Judge judge;
        judge.expect({largest_of_rows(outputs[0], outputs[1]), decoder.outputs()[1]}, 0);
        good = judge.agrees(outputs, request.tolerance, programs.token.tolerances);
    }
    mover.reset();
    for (Communicators* const some : {&of_prompts, &communicators, &all}) some->close();
    return good ? 0 : 1;
}

int decode(int argc, char** argv, const Continuing& programs, const std::optional<Continuing>& reference) {
    return with_options(argc, argv, kDecodeHelp, [&](const Options& options) { return decode(options, programs, reference ? &*reference : nullptr); });
}

}  // namespace ithaca
