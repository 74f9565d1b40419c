// The rank of this process, from the environment of torchrun, mpirun or srun, and the exchange of NCCL's id.
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
    int64_t seconds = 600;  // timeout of every wait for other ranks
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
    static const char* const launchers[][3] = {
        {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
        {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
    };
    for (const auto& names : launchers) {
        World world;
        if (!environment_number(names[0], world.rank) || !environment_number(names[1], world.size)) continue;
        world.local_rank = world.rank;
        environment_number(names[2], world.local_rank);
        if (world.size < 1 || world.rank >= world.size)
            throw Error(std::string(names[0]) + "=" + std::to_string(world.rank) + " is not below " + names[1] + "=" +
                        std::to_string(world.size));
        return world;
    }
    return {};
}

// Sends or receives n bytes.
template <typename Call, typename Data>
bool transfer_all(Call call, int fd, Data data, size_t n, int flags) {
    while (n > 0) {
        const ssize_t done = call(fd, data, n, flags);
        if (done <= 0) return false;
        data += done;
        n -= static_cast<size_t>(done);
    }
    return true;
}
inline bool send_all(int fd, const char* data, size_t n) { return transfer_all(::send, fd, data, n, MSG_NOSIGNAL); }
inline bool recv_all(int fd, char* data, size_t n) { return transfer_all(::recv, fd, data, n, 0); }

// Rank 0 writes the id to a file that all ranks can read. The path must be new for every launch.
inline void meet_by_file(const World& world, const std::string& path, ncclUniqueId& id) {
    if (world.rank == 0) {
        std::ofstream out(path + ".new", std::ios::binary);
        out.write(id.internal, sizeof id.internal);
        out.close();
        if (!out || std::rename((path + ".new").c_str(), path.c_str()) != 0)
            throw Error("cannot write the rendezvous file " + path);
        return;
    }
    for (const Deadline deadline(static_cast<double>(world.seconds)); deadline.pause();) {
        std::ifstream in(path, std::ios::binary);
        if (in.read(id.internal, sizeof id.internal)) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    throw Error("no rendezvous file " + path + " after " + std::to_string(world.seconds) + " s");
}

// torchrun's own store listens at MASTER_PORT, so the ranks meet one port above it. ITHACA_PORT overrides.
inline int64_t rendezvous_port() {
    int64_t port = 29500;
    if (environment_number("MASTER_PORT", port) && std::getenv("TORCHELASTIC_RUN_ID") != nullptr) ++port;
    environment_number("ITHACA_PORT", port);
    if (port < 1 || port > 65535) throw Error("port " + std::to_string(port) + " is not between 1 and 65535");
    return port;
}

inline constexpr char kGreeting[8] = {'i', 't', 'h', 'a', 'c', 'a', '0', '1'};

// A listening socket of a family; -1 on failure.
template <typename Any>
int listen_at(int family, const Any& any) {
    const int fd = ::socket(family, SOCK_STREAM, 0), on = 1, off = 0;
    if (fd < 0) return -1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (family == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (::bind(fd, reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0 && ::listen(fd, SOMAXCONN) == 0) return fd;
    ::close(fd);
    return -1;
}

inline void serve_id(const World& world, int64_t port, const ncclUniqueId& id) {
    sockaddr_in6 any6{};
    any6.sin6_family = AF_INET6;
    any6.sin6_port = htons(static_cast<uint16_t>(port));
    sockaddr_in any4{};
    any4.sin_family = AF_INET;
    any4.sin_port = any6.sin6_port;
    int listener = listen_at(AF_INET6, any6);
    if (listener < 0) listener = listen_at(AF_INET, any4);  // a machine without IPv6
    if (listener < 0) throw Error("cannot listen at port " + std::to_string(port) + ": " + std::strerror(errno));
    const timeval limit{static_cast<time_t>(world.seconds), 0}, greeting_limit{5, 0};
    ::setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    for (int64_t served = 1; served < world.size;) {
        const int peer = ::accept(listener, nullptr, nullptr);
        if (peer < 0)
            throw Error("only " + std::to_string(served) + " of " + std::to_string(world.size) +
                        " ranks came to the rendezvous");
        ::setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &greeting_limit, sizeof greeting_limit);
        char greeting[sizeof kGreeting];
        // Other clients are turned away.
        const bool ours = recv_all(peer, greeting, sizeof greeting) && std::memcmp(greeting, kGreeting, sizeof greeting) == 0;
        if (ours && send_all(peer, id.internal, sizeof id.internal)) ++served;
        ::close(peer);
    }
    ::close(listener);
}

inline void fetch_id(const World& world, const std::string& host, int64_t port, ncclUniqueId& id) {
    const std::string service = std::to_string(port);
    for (const Deadline deadline(static_cast<double>(world.seconds)); deadline.pause();) {
        addrinfo hints{}, *found = nullptr;
        hints.ai_socktype = SOCK_STREAM;
        if (::getaddrinfo(host.c_str(), service.c_str(), &hints, &found) != 0) found = nullptr;
        bool done = false;
        for (addrinfo* a = found; a != nullptr && !done; a = a->ai_next) {
            const int fd = ::socket(a->ai_family, a->ai_socktype, a->ai_protocol);
            if (fd < 0) continue;
            done = ::connect(fd, a->ai_addr, a->ai_addrlen) == 0 && send_all(fd, kGreeting, sizeof kGreeting) &&
                   recv_all(fd, id.internal, sizeof id.internal);
            ::close(fd);
        }
        if (found != nullptr) ::freeaddrinfo(found);
        if (done) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    throw Error("rank 0 does not answer at " + host + ":" + service + " (MASTER_ADDR, MASTER_PORT, ITHACA_PORT)");
}

// Gives every rank the id of rank 0: through ITHACA_RENDEZVOUS=file:PATH, or over TCP.
inline void rendezvous(const World& world, ncclUniqueId& id) {
    if (world.size == 1) return;
    const char* how = std::getenv("ITHACA_RENDEZVOUS");
    if (how != nullptr && *how != '\0') {
        if (std::strncmp(how, "file:", 5) != 0) throw Error(std::string("ITHACA_RENDEZVOUS=") + how + " is not file:PATH");
        return meet_by_file(world, how + 5, id);
    }
    const char* host = std::getenv("MASTER_ADDR");
    const int64_t port = rendezvous_port();
    if (world.rank == 0) return serve_id(world, port, id);
    fetch_id(world, host != nullptr && *host != '\0' ? host : "127.0.0.1", port, id);
}

}  // namespace ithaca
