// Communicators of the mesh. No call of them blocks: they are made, used and ended in the background, and looked at until they
// are there, for as long as ranks may wait for each other. So a rank that does not come ends the others too.
#pragma once

#include <string>
#include <vector>

#include "check.hpp"
#include "patience.hpp"
#include "rendezvous.hpp"
#include "space.hpp"

namespace ithaca {

// How a communicator stands: ready, in progress, or what failed.
inline ncclResult_t state_of(ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
    return asked != ncclSuccess ? asked : state;
}

// Whether something goes on in the background of a communicator; what failed there ends the process.
inline bool is_busy(ncclComm_t comm) {
    const ncclResult_t state = state_of(comm);
    if (has_failed(state)) fail(__FILE__, __LINE__, "ncclCommGetAsyncError", ncclGetErrorString(state));
    return state == ncclInProgress;
}

// The world, and a communicator for each axis.
struct Communicators {
    ncclComm_t world = nullptr;
    std::vector<ncclComm_t> axes;

    // Collective over the world.
    void open(const Space& space, const World& self) {
        opening() = self.rank;
        ending().where = [] { return "rank " + std::to_string(opening()) + " failed"; };
        seconds_ = static_cast<double>(self.seconds);
        ncclUniqueId id{};
        if (self.rank == 0) ITHACA_NCCL(ncclGetUniqueId(&id));
        rendezvous(self, id);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        ITHACA_NCCL(ncclCommInitRankConfig(&world, static_cast<int>(self.size), id, static_cast<int>(self.rank), &config));
        come(world, "the communicator of all ranks");
        // The library writes a part's place whenever it likes until the world is ready again.
        axes.assign(space.axes.size(), nullptr);
        for (size_t a = 0; a < space.axes.size(); ++a) {
            const int axis = static_cast<int>(a);
            const int key = static_cast<int>(space.coordinate(self.rank, axis));
            const int color = static_cast<int>(space.group(self.rank, {axis}).front());
            const std::string what = std::string("the communicators along `") + space.axes[a].name + "`";
            ITHACA_NCCL(ncclCommSplit(world, color, key, &axes[a], &config));
            come(world, what);
            come(axes[a], what);
        }
        ending() = {};
    }

    std::vector<ncclComm_t> all() const {
        std::vector<ncclComm_t> all = axes;
        if (world != nullptr) all.push_back(world);
        return all;
    }

    // Ranks say goodbye together, parts before the world; what does not end, or fails now that all is done, is aborted.
    void close() {
        for (ncclComm_t comm : all()) {
            ncclResult_t state = ncclCommFinalize(comm);
            for (const Patience patience(seconds_); !has_failed(state) && patience.pause();) {
                state = state_of(comm);
                if (state == ncclSuccess) break;
            }
            state == ncclSuccess ? ncclCommDestroy(comm) : ncclCommAbort(comm);
        }
    }

  private:
    static int64_t& opening() {
        static int64_t rank = 0;
        return rank;
    }

    // Waits for what is made in the background.
    void come(ncclComm_t comm, const std::string& what) const {
        for (const Patience patience(seconds_); is_busy(comm);)
            if (!patience.pause()) fail(__FILE__, __LINE__, what.c_str(), patience.complaint().c_str());
    }

    double seconds_ = 0;
};

}  // namespace ithaca
