// The rank of this process, from the environment of torchrun, mpirun or srun; the exchange of NCCL's id; and the communicators,
// one of all ranks and one along each mesh axis. Calls of NCCL are non-blocking and polled with a timeout, so that a missing
// rank ends the others as well.
#pragma once

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "check.hpp"

namespace ithaca {

struct World {
    int64_t rank = 0, size = 1, local_rank = 0;
};

inline bool environment_number(const char* name, int64_t& value) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == '\0') return false;
    char* end = nullptr;
    errno = 0;
    const long long number = std::strtoll(text, &end, 10);
    if (*end != '\0' || errno != 0 || number < 0) throw Error(std::string(name) + "=" + text + " is not a number");
    value = number;
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

// Sends or receives n bytes.
template <typename Call, typename Data>
bool transfer_all(Call call, int fd, Data data, size_t n) {
    while (n > 0) {
        const ssize_t done = call(fd, data, n, MSG_NOSIGNAL);
        if (done <= 0) return false;
        data += done;
        n -= done;
    }
    return true;
}

// Rank 0 writes the id to a file that all ranks can read. The path must be new for every launch.
inline void meet_by_file(const World& world, double seconds, const std::string& path, ncclUniqueId& id) {
    if (world.rank == 0) {
        std::ofstream out(path + ".new", std::ios::binary);
        out.write(id.internal, sizeof id.internal);
        out.close();
        if (!out || std::rename((path + ".new").c_str(), path.c_str()) != 0) throw Error("cannot write the rendezvous file " + path);
        return;
    }
    for (const Deadline deadline(seconds); deadline.pause();)
        if (std::ifstream in(path, std::ios::binary); in.read(id.internal, sizeof id.internal)) return;
    throw Error("no rendezvous file " + path + " after " + std::to_string(static_cast<int64_t>(seconds)) + " s");
}

inline constexpr char kGreeting[8] = {'i', 't', 'h', 'a', 'c', 'a', '0', '1'};

// Calls `use` with a socket for each address of a host, until it gives true.
template <typename Use>
bool with_socket(const char* host, const std::string& port, int flags, const Use& use) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    if (::getaddrinfo(host, port.c_str(), &hints, &found) != 0) return false;
    bool done = false;
    for (addrinfo* a = found; a != nullptr && !done; a = a->ai_next) {
        const int fd = ::socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        if (fd < 0) continue;
        done = use(fd, a);
        ::close(fd);
    }
    ::freeaddrinfo(found);
    return done;
}

inline void serve_id(const World& world, double seconds, const std::string& port, const ncclUniqueId& id) {
    const timeval limit{static_cast<time_t>(seconds), 0}, greeting_limit{5, 0};
    const auto serve = [&](int listener) {
        for (int64_t served = 1; served < world.size;) {
            const int peer = ::accept(listener, nullptr, nullptr);
            if (peer < 0)
                throw Error("only " + std::to_string(served) + " of " + std::to_string(world.size) + " ranks came to the rendezvous");
            ::setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &greeting_limit, sizeof greeting_limit);
            // Other clients are turned away.
            char greeting[sizeof kGreeting];
            const bool ours = transfer_all(::recv, peer, greeting, sizeof greeting) && std::memcmp(greeting, kGreeting, sizeof greeting) == 0;
            if (ours && transfer_all(::send, peer, id.internal, sizeof id.internal)) ++served;
            ::close(peer);
        }
    };
    const auto listen_and_serve = [&](int family, int fd, const addrinfo* a) {
        const int on = 1, off = 0;
        if (a->ai_family != family) return false;
        ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        if (family == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
        if (::bind(fd, a->ai_addr, a->ai_addrlen) != 0 || ::listen(fd, SOMAXCONN) != 0) return false;
        serve(fd);
        return true;
    };
    // IPv6 takes IPv4 as well, where the machine has it.
    for (int family : {AF_INET6, AF_INET})
        if (with_socket(nullptr, port, AI_PASSIVE, [&](int fd, const addrinfo* a) { return listen_and_serve(family, fd, a); })) return;
    throw Error("cannot listen at port " + port + ": " + std::strerror(errno));
}

inline void fetch_id(const std::string& host, double seconds, const std::string& port, ncclUniqueId& id) {
    const auto fetch = [&](int fd, const addrinfo* a) {
        return ::connect(fd, a->ai_addr, a->ai_addrlen) == 0 && transfer_all(::send, fd, kGreeting, sizeof kGreeting) &&
               transfer_all(::recv, fd, id.internal, sizeof id.internal);
    };
    for (const Deadline deadline(seconds); deadline.pause(); std::this_thread::sleep_for(std::chrono::milliseconds(50)))
        if (with_socket(host.c_str(), port, 0, fetch)) return;
    throw Error("rank 0 does not answer at " + host + ":" + port + " (MASTER_ADDR, MASTER_PORT, ITHACA_PORT)");
}

// Gives every rank the id of rank 0: through ITHACA_RENDEZVOUS=file:PATH, or over TCP. torchrun's own store listens at
// MASTER_PORT, so the ranks meet one port above it. ITHACA_PORT overrides.
inline void rendezvous(const World& world, double seconds, ncclUniqueId& id) {
    if (world.size == 1) return;
    const auto environment = [](const char* name) {
        const char* text = std::getenv(name);
        return std::string(text != nullptr ? text : "");
    };
    const std::string how = environment("ITHACA_RENDEZVOUS"), host = environment("MASTER_ADDR");
    if (!how.empty()) {
        if (how.compare(0, 5, "file:") != 0) throw Error("ITHACA_RENDEZVOUS=" + how + " is not file:PATH");
        return meet_by_file(world, seconds, how.substr(5), id);
    }
    int64_t port = 29500;
    if (environment_number("MASTER_PORT", port) && std::getenv("TORCHELASTIC_RUN_ID") != nullptr) ++port;
    environment_number("ITHACA_PORT", port);
    if (port < 1 || port > 65535) throw Error("port " + std::to_string(port) + " is not between 1 and 65535");
    if (world.rank == 0) return serve_id(world, seconds, std::to_string(port), id);
    fetch_id(host.empty() ? "127.0.0.1" : host, seconds, std::to_string(port), id);
}

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
        for (size_t a = axis + 1; a < axes.size(); ++a) n *= axes[a].size;
        return n;
    }
    int64_t ranks() const { return stride(-1); }
    int64_t coordinate(int64_t rank, int axis) const { return rank / stride(axis) % axes[axis].size; }
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
