// What is said of tiles of queries and keys, against every pair of them: random bands and tables of strips, padding.
// Ends with 1 where a tile that is said to be seen, or not to be, is not, or where too few tiles are certain.
#include <cstdio>
#include <random>
#include <vector>

#include "mask_tile.cuh"

using namespace ithaca::kernel;

namespace {

std::mt19937 random_number(3);
int below(int n) { return static_cast<int>(random_number() % static_cast<unsigned>(n)); }

// A table of up to four strips, of which each has up to two runs: of keys, or from a key to the query.
std::vector<double> table() {
    const int n = 1 + below(4);
    std::vector<double> strips{static_cast<double>(n)}, runs;
    double query = below(10);
    for (int i = 0; i < n; ++i) {
        const double end = query + 1 + below(40);
        const auto first = static_cast<double>(runs.size() / 4);
        double key = below(20);
        for (int left = below(3); left > 0; --left) {
            const double last = key + 1 + below(60);
            if (below(2) == 0) runs.insert(runs.end(), {0, key, 0, last});
            else runs.insert(runs.end(), {0, key, 1, 1});
            key = last + below(20);
        }
        strips.insert(strips.end(), {query, end, first, static_cast<double>(runs.size() / 4)});
        query = end + below(2) * below(10);
    }
    strips.insert(strips.end(), runs.begin(), runs.end());
    return strips;
}

}  // namespace

int main() {
    long wrong = 0, certain = 0, could_be = 0;
    for (int i = 0; i < 20000; ++i) {
        Mask mask{-1, -1, 0, nullptr};
        std::vector<double> strips;
        if (below(2) == 0) {
            if (below(2) == 0) mask.left = below(50);
            if (below(2) == 0) mask.right = below(50);
        } else {
            strips = table();
            mask.strips = strips.data();
        }
        const int64_t valid = 60 + below(100), query = below(100), key = below(150);
        const Span queries{query, query + 1 + below(40)}, keys{key, key + 1 + below(40)};
        long all = 0, seen = 0;
        for (int64_t q = queries.first; q < queries.last; ++q) {
            for (int64_t k = keys.first; k < keys.last; ++k) {
                ++all;
                seen += k < valid && sees(mask, q, k) ? 1 : 0;
            }
        }
        const Seen said = seen_of(mask, valid, queries, keys);
        const bool has_padding = keys.last > valid;
        wrong += said == Seen::All && seen != all;
        wrong += said == Seen::Nothing && seen != 0;
        wrong += asks(said) && (said == Seen::Padded) != has_padding;
        if (seen != 0 && seen != all) continue;
        ++could_be;
        certain += !asks(said);
    }
    std::printf("%ld wrong; %ld of %ld tiles that are certain are known to be\n", wrong, certain, could_be);
    return wrong == 0 && certain * 100 > could_be * 99 ? 0 : 1;
}
