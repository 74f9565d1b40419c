// The rank of this process, from the environment of torchrun, mpirun or srun; the exchange of NCCL's id; and the communicators,
// one of all ranks and one along each mesh axis. Calls of NCCL are non-blocking and polled with a timeout, so that a missing
// rank ends the others as well.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstring>

#include "check.hpp"

namespace ithaca {

struct World {
    int64_t rank = 0, size = 1, local_rank = 0;
};

// Whether the text is a whole number that is not negative.
inline bool parse_integer(const std::string& text, int64_t& value) {
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data(), end, value);
    return parsed.ec == std::errc{} && parsed.ptr == end && value >= 0;
}

inline bool environment_number(const char* name, int64_t& value) {
    const char* const text = std::getenv(name);
    if (text == nullptr || *text == '\0') return false;
    if (!parse_integer(text, value)) throw Error(std::string(name) + "=" + text + " is not a number");
    return true;
}

// A process without a launcher is rank 0 of 1.
inline World world_of_environment() {
    static const char* const launchers[][3] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK"},
                                               {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
                                               {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
    for (const auto& names : launchers) {
        World world;
        if (!environment_number(names[0], world.rank) || !environment_number(names[1], world.size)) continue;
        world.local_rank = world.rank;
        environment_number(names[2], world.local_rank);
        if (world.rank < world.size) return world;
        throw Error(std::string(names[0]) + "=" + std::to_string(world.rank) + " is not below " + names[1] + "=" +
                    std::to_string(world.size));
    }
    return {};
}

// The secret of the job, or nothing: ITHACA_JOB_SECRET, or the id that torchrun's own rendezvous draws.
inline std::string job_secret() {
    if (const char* const secret = std::getenv("ITHACA_JOB_SECRET"); secret != nullptr && *secret != '\0') {
        const std::string given = secret;
        if (given.size() >= 16) return given;
        throw Error("ITHACA_JOB_SECRET has " + std::to_string(given.size()) + " bytes and needs at least 16");
    }
    const char* const run = std::getenv("TORCHELASTIC_RUN_ID");
    const std::string id = run != nullptr ? run : "";
    const bool is_uuid = id.size() == 36 && id.find_first_not_of("-0123456789abcdefABCDEF") == std::string::npos;
    return is_uuid ? id : "";
}

// A number from 1 on that follows from the secret of the job, and does not give it away.
inline uint64_t job_number(const std::string& secret) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const unsigned char c : secret) hash = (hash ^ c) * 0x100000001b3;
    hash = (hash ^ (hash >> 31)) * 0x7fb5d329728ea185;
    hash = (hash ^ (hash >> 27)) * 0x81dadef4bc2dd44d;
    return std::max<uint64_t>(hash ^ (hash >> 33), 1);
}

// The id by which NCCL joins the ranks over TCP, at NCCL_COMM_ID. Without that variable it is MASTER_ADDR:MASTER_PORT; under
// torchrun, whose own store listens there, one port above. ITHACA_PORT overrides the port.
//
// NCCL takes whoever says the number at the start of the id for a rank. With NCCL_COMM_ID it is a constant, so the job's own
// takes its place; without a secret ranks meet on the loopback interface only.
inline ncclUniqueId rendezvous(const World& world) {
    const char* const master = std::getenv("MASTER_ADDR");
    const std::string host = master != nullptr ? master : "127.0.0.1";
    int64_t port = 29500;
    if (environment_number("MASTER_PORT", port) && std::getenv("TORCHELASTIC_RUN_ID") != nullptr) ++port;
    environment_number("ITHACA_PORT", port);
    if (port < 1 || port > 65535) throw Error("port " + std::to_string(port) + " is not between 1 and 65535");
    const std::string secret = job_secret();
    const bool is_here = host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
    if (world.size > 1 && std::getenv("NCCL_COMM_ID") == nullptr) {
        if (secret.empty() && !is_here)
            throw Error("MASTER_ADDR=" + host + " is not this machine alone, and anyone who reaches it could join the job: give all "
                        "processes one secret, `export ITHACA_JOB_SECRET=$(openssl rand -hex 32)`; `mpirun` passes it on with "
                        "`-x ITHACA_JOB_SECRET`, `srun` by itself");
        ::setenv("NCCL_COMM_ID", (host + ":" + std::to_string(port)).c_str(), 0);
    }
    const uint64_t number = job_number(secret);
    if (!secret.empty()) ::setenv("NCCL_SOCKET_MAGIC", std::to_string(number).c_str(), 0);
    ncclUniqueId id{};
    ITHACA_NCCL(ncclGetUniqueId(&id));
    if (!secret.empty() && world.size > 1) std::memcpy(id.internal, &number, sizeof number);
    return id;
}

struct Axis {
    const char* name;
    int64_t size;
};

// Ranks are numbered row-major: the last axis varies fastest.
struct Mesh {
    std::vector<Axis> axes;
    std::vector<std::vector<int>> more = {};  // the axes of each further communicator, which number its ranks; none for all ranks

    int64_t stride(int axis) const {
        int64_t n = 1;
        for (size_t a = axis + 1; a < axes.size(); ++a) n *= axes[a].size;
        return n;
    }
    int64_t ranks() const { return stride(-1); }
    int64_t coordinate(int64_t rank, int axis) const { return rank / stride(axis) % axes[axis].size; }
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

// Communicators are numbered: that of all ranks, those along the mesh axes, and further ones: along several axes, or of streams of
// their own.
inline constexpr int kWorld = 0;

// This rank is that of a number among `size`.
struct Communicator {
    ncclComm_t comm;
    int64_t size, number;
};

struct Communicators {
    std::vector<Communicator> all;
    // All ranks must call it; those of a program among `others` number the same processes otherwise, and a process without a rank has none.
    void open(const Mesh& mesh, const World& self, double seconds, const Communicators* others = nullptr) {
        seconds_ = seconds;
        // NCCL writes the handle of a split until the world is ready again, so the vector must not grow.
        all.assign(1 + mesh.axes.size() + mesh.more.size(), {nullptr, self.size, self.rank});
        ncclComm_t& world = all[kWorld].comm;
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        if (others != nullptr) {
            const bool has_rank = self.rank >= 0;
            ITHACA_NCCL(ncclCommSplit(others->all[kWorld].comm, has_rank ? 0 : NCCL_SPLIT_NOCOLOR, has_rank ? static_cast<int>(self.rank) : 0, &world, &config));
            wait_for(others->all[kWorld].comm, "the communicator of all ranks");
            if (!has_rank) return all.clear();
        } else {
            const ncclUniqueId id = rendezvous(self);
            ITHACA_NCCL(ncclCommInitRankConfig(&world, static_cast<int>(self.size), id, static_cast<int>(self.rank), &config));
        }
        wait_for(world, "the communicator of all ranks");
        for (size_t a = 0; 1 + a < all.size(); ++a) {
            const bool is_of_axis = a < mesh.axes.size();
            const std::vector<int> along = is_of_axis ? std::vector<int>{static_cast<int>(a)} : mesh.more[a - mesh.axes.size()];
            auto& [comm, size, number] = all[1 + a];
            int64_t color = 0;
            std::string name = "another communicator of all ranks";
            if (!along.empty()) {
                size = 1, number = 0, color = self.rank, name = "the communicators along";
                for (const int axis : along) {
                    const int64_t at = mesh.coordinate(self.rank, axis);
                    size *= mesh.axes[axis].size, number = number * mesh.axes[axis].size + at, color -= at * mesh.stride(axis);
                    name += std::string(" `") + mesh.axes[axis].name + "`";
                }
            }
            ITHACA_NCCL(ncclCommSplit(world, static_cast<int>(color), static_cast<int>(number), &comm, &config));
            wait_for(world, name);
            wait_for(comm, name);
        }
    }
    // All ranks finalize together, splits before the world. A communicator that fails or exceeds the timeout is aborted.
    void close() {
        for (; !all.empty(); all.pop_back()) {
            const ncclComm_t comm = all.back().comm;
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
