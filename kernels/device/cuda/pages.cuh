// Where tokens of a cache are: by position, and in pages.
#pragma once

#include "sequence.cuh"

namespace ithaca::kernel {

// Which token has a position, a `Sequence` the other way round: three numbers for each run, the position, the token, the number of tokens; ascending by position.
struct Inverse {
    const int64_t* runs;
    int64_t n;

    // Negative where the rank has no such token.
    __device__ int64_t token_at(int64_t position) const {
        if (n == 0) return -1;
        int64_t low = 0, high = n - 1;  // the last run that starts at or before the position
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (runs[3 * middle] <= position) low = middle;
            else high = middle - 1;
        }
        const int64_t* run = runs + 3 * low;
        const int64_t behind = position - run[0];
        return behind >= 0 && behind < run[2] ? run[1] + behind : -1;
    }
};

// Caches in pages: the table [sequences, entries] says which page has which tokens of a sequence.
struct Paged {
    const int32_t* table;
    Inverse pages, slots;  // those of the rank
    int64_t entries, page_tokens, n_slots;
    int64_t first, others_from, others_to;  // the number of the first page, and those of pages in other memory

    static constexpr int64_t kElsewhere = -1, kNoPage = -2;

    // Where the rank has a token: the page times the slots that it has of each, plus the slot.
    __device__ int64_t row_of(int64_t sequence, int64_t position) const {
        const Division entry = divide(position, page_tokens);
        const int64_t slot = slots.token_at(entry.remainder);
        if (slot < 0) return kElsewhere;
        const int64_t number = entry.quotient < entries ? table[sequence * entries + entry.quotient] : -1;
        if (number >= others_from && number < others_to) return kElsewhere;
        const int64_t page = number >= first ? pages.token_at(number - first) : -1;
        return page < 0 ? kNoPage : page * n_slots + slot;
    }
};

}  // namespace ithaca::kernel
