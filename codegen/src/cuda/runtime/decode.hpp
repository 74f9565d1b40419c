// The command line of a program that decodes, which decode.cu defines; and where states go between its two programs.
#pragma once

#include <optional>

#include "device.hpp"

namespace ithaca {

// Equal pieces of a dimension, at equal distances in the part of the rank that sends and in that of the one that receives.
struct Pieces {
    int64_t first[2], length, count, steps[2];
};

// The elements of a state that go from a rank of prompts to one of tokens: all combinations of pieces of each dimension.
struct Move {
    int64_t ranks[2];
    std::vector<std::vector<Pieces>> dims;
};

// States that have the same moves, for each round of sequences; and the micro-batches of which they are parts, negative where there
// is one.
struct Moved {
    std::vector<const char*> names;
    int64_t micro_batches[2];
    std::vector<std::vector<Move>> rounds;
};

// The process of each rank of prompts and of each of tokens; and the states that move, in so many rounds.
struct Handover {
    std::vector<int64_t> processes[2];
    int64_t rounds;
    std::vector<Moved> states;

    int64_t n_processes() const { return 1 + *std::max_element(processes[1].begin(), processes[1].end()); }
    // The rank of a process in the program of prompts (0) or of tokens (1); negative where it has none.
    int64_t rank(int side, int64_t process) const {
        const auto found = std::find(processes[side].begin(), processes[side].end(), process);
        return found == processes[side].end() ? -1 : found - processes[side].begin();
    }
};

// The programs of a step of prompts and of a step of a token; and where states go between the two, if they do.
struct Continuing {
    const Program &prompts, &token;
    std::optional<Handover> handover = {};
};

// Runs the programs; without a reference they cannot check themselves. The status of the process.
int decode(int argc, char** argv, const Continuing& programs, const std::optional<Continuing>& reference);

}  // namespace ithaca
