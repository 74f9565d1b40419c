// NCCL communicators: one of all ranks and one along each mesh axis. All calls are non-blocking and polled with a timeout,
// so that a missing rank ends the others as well.
#pragma once

#include "rendezvous.hpp"

namespace ithaca {

struct Axis {
    const char* name;
    int64_t size;
};

// The ranks with one coordinate along an axis, such as a stage of a pipeline; all ranks without an axis.
struct Place {
    int axis = -1;
    int64_t coordinate = 0;
};

// Ranks are numbered row-major: the last axis varies fastest.
struct Mesh {
    std::vector<Axis> axes;

    int64_t stride(int axis) const {
        int64_t n = 1;
        for (size_t a = static_cast<size_t>(axis) + 1; a < axes.size(); ++a) n *= axes[a].size;
        return n;
    }
    int64_t ranks() const { return stride(-1); }
    int64_t coordinate(int64_t rank, int axis) const { return rank / stride(axis) % axes[static_cast<size_t>(axis)].size; }
    bool is_at(const Place& place, int64_t rank) const {
        return place.axis < 0 || coordinate(rank, place.axis) == place.coordinate;
    }
};

// Ready, in progress, or the failure.
inline ncclResult_t state_of(ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm, &state);
    return asked != ncclSuccess ? asked : state;
}

// Whether a call is in progress. A failure ends the process.
inline bool is_busy(ncclComm_t comm) {
    const ncclResult_t state = state_of(comm);
    if (has_failed(state)) fail(__FILE__, __LINE__, "ncclCommGetAsyncError", ncclGetErrorString(state));
    return state == ncclInProgress;
}

struct Communicators {
    ncclComm_t world = nullptr;
    std::vector<ncclComm_t> axes;
    // All ranks must call it.
    void open(const Mesh& mesh, const World& self, double seconds) {
        static int64_t rank = 0;
        rank = self.rank;
        failure_handler.where = [] { return "rank " + std::to_string(rank) + " failed"; };
        seconds_ = seconds;
        ncclUniqueId id{};
        if (self.rank == 0) ITHACA_NCCL(ncclGetUniqueId(&id));
        rendezvous(self, seconds, id);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        ITHACA_NCCL(ncclCommInitRankConfig(&world, static_cast<int>(self.size), id, static_cast<int>(self.rank), &config));
        wait_for(world, "the communicator of all ranks");
        // NCCL writes the handle of a split until the world is ready again, so the vector must not grow.
        axes.assign(mesh.axes.size(), nullptr);
        for (size_t a = 0; a < axes.size(); ++a) {
            const int axis = static_cast<int>(a);
            const int64_t key = mesh.coordinate(self.rank, axis), color = self.rank - key * mesh.stride(axis);
            const std::string name = std::string("the communicators along `") + mesh.axes[a].name + "`";
            ITHACA_NCCL(ncclCommSplit(world, static_cast<int>(color), static_cast<int>(key), &axes[a], &config));
            wait_for(world, name);
            wait_for(axes[a], name);
        }
        failure_handler = {};
    }

    std::vector<ncclComm_t> all() const {
        std::vector<ncclComm_t> all = axes;
        if (world != nullptr) all.push_back(world);
        return all;
    }
    // All ranks finalize together, splits before the world. A communicator that fails or exceeds the timeout is aborted.
    void close() {
        for (ncclComm_t comm : all()) {
            ncclResult_t state = ncclCommFinalize(comm);
            for (const Deadline deadline(seconds_); !has_failed(state) && deadline.pause();) {
                state = state_of(comm);
                if (state == ncclSuccess) break;
            }
            state == ncclSuccess ? ncclCommDestroy(comm) : ncclCommAbort(comm);
        }
    }
  private:
    void wait_for(ncclComm_t comm, const std::string& name) const {
        for (const Deadline deadline(seconds_); is_busy(comm);)
            if (!deadline.pause()) fail(__FILE__, __LINE__, name.c_str(), deadline.message().c_str());
    }

    double seconds_ = 0;
};

}  // namespace ithaca
