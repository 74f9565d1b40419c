// NCCL between processes of one host, over a mesh of Unix sockets. Operations between a group's start and end make
// progress together, as NCCL promises. Nothing blocks: communicators and their parts come, and data moves, while they are
// looked at; what was asked of one has to have ended before it is asked for more, and its data is there then, which synchronous
// streams allow.
//
// NCCL_ON_HOST_ABSENT is a rank that never comes into the communicator of all, NCCL_ON_HOST_ABSENT_PART one that never comes
// into a part.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

enum ncclResult_t {
    ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5, ncclInProgress = 7,
};
enum ncclDataType_t {
    ncclInt8 = 0, ncclInt32 = 2, ncclFloat16 = 6, ncclFloat32 = 7, ncclFloat64 = 8, ncclBfloat16 = 9,
};
enum ncclRedOp_t { ncclSum = 0 };
struct ncclUniqueId {
    char internal[128];
};
struct ncclConfig_t {
    int blocking;
};
#define NCCL_CONFIG_INITIALIZER \
    { 1 }

// A communicator: for each member the socket to it.
struct ncclComm {
    int rank;
    std::vector<int> peers;
    bool owns;
    // Where it is being made: what the others find this rank by, and how many of them are there.
    ncclUniqueId id = {};
    int listener = -1, n_there = 0;
    // Looks until it is ready, once all is done.
    int looks = 0;
    bool never = false;
};
using ncclComm_t = ncclComm*;

namespace nccl_on_host {

struct Job {
    int fd;
    char* data;
    size_t n;
};

constexpr int kLooks = 2;

struct Group {
    int depth = 0;
    std::deque<Job> sends, recvs;
    std::vector<std::function<void()>> after;
    // Those that something was asked of.
    std::vector<ncclComm_t> comms;
};

// The rank that a variable of the environment names, or none.
inline int rank_of(const char* variable) {
    const char* const text = std::getenv(variable);
    return text != nullptr ? std::atoi(text) : -1;
}

inline Group& group() {
    static Group g;
    return g;
}

inline size_t width(ncclDataType_t t) {
    switch (t) {
        case ncclInt8: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclFloat32: return 4;
        case ncclFloat64: return 8;
    }
    return 0;
}

inline void enqueue(std::deque<Job>& jobs, int fd, const void* data, size_t n) {
    if (n > 0) jobs.push_back({fd, const_cast<char*>(static_cast<const char*>(data)), n});
}

// Moves what can be moved of the first job of each socket; false when a peer is gone.
inline bool progress(std::deque<Job>& jobs, bool sending) {
    std::vector<int> seen;
    for (size_t i = 0; i < jobs.size();) {
        Job& job = jobs[i];
        bool first = true;
        for (int fd : seen) first = first && fd != job.fd;
        seen.push_back(job.fd);
        if (!first) {
            ++i;
            continue;
        }
        const ssize_t n = sending ? ::send(job.fd, job.data, job.n, MSG_NOSIGNAL | MSG_DONTWAIT)
                                  : ::recv(job.fd, job.data, job.n, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return false;
        if (n > 0) {
            job.data += n;
            job.n -= static_cast<size_t>(n);
            if (job.n == 0) {
                jobs.erase(jobs.begin() + static_cast<long>(i));
                continue;
            }
        }
        ++i;
    }
    return true;
}

// Moves what can be moved of what groups asked for.
inline ncclResult_t go_on() {
    Group& g = group();
    if (g.depth > 0) return ncclSuccess;
    if (!progress(g.sends, true) || !progress(g.recvs, false)) return ncclSystemError;
    if (!g.sends.empty() || !g.recvs.empty()) return ncclInProgress;
    for (const auto& f : g.after) f();
    g.after.clear();
    g.comms.clear();
    return ncclSuccess;
}

// Something is asked of a communicator, which nothing goes on in unless it is of the same group.
inline bool ask(ncclComm_t c) {
    Group& g = group();
    const bool asked = std::find(g.comms.begin(), g.comms.end(), c) != g.comms.end();
    if (c->n_there + 1 < static_cast<int>(c->peers.size()) || (!asked && c->looks > 0) || (asked && g.depth == 0)) return false;
    if (!asked) g.comms.push_back(c);
    c->looks = kLooks;
    return true;
}

inline ncclResult_t done() { return group().depth == 0 ? ncclInProgress : ncclSuccess; }

template <typename T, typename Add>
void sum_into(char* z, const std::vector<std::vector<char>>& parts, size_t n, Add add) {
    for (size_t i = 0; i < n; ++i) {
        T sum;
        std::memcpy(&sum, parts[0].data() + i * sizeof(T), sizeof(T));
        for (size_t p = 1; p < parts.size(); ++p) {
            T x;
            std::memcpy(&x, parts[p].data() + i * sizeof(T), sizeof(T));
            sum = add(sum, x);
        }
        std::memcpy(z + i * sizeof(T), &sum, sizeof(T));
    }
}

inline void sum(ncclDataType_t t, char* z, const std::vector<std::vector<char>>& parts, size_t n) {
    switch (t) {
        case ncclFloat64: return sum_into<double>(z, parts, n, [](double a, double b) { return a + b; });
        case ncclFloat32: return sum_into<float>(z, parts, n, [](float a, float b) { return a + b; });
        case ncclInt32: return sum_into<int32_t>(z, parts, n, [](int32_t a, int32_t b) { return a + b; });
        case ncclInt8: return sum_into<int8_t>(z, parts, n, [](int8_t a, int8_t b) { return int8_t(a + b); });
        case ncclFloat16:
            return sum_into<__half>(z, parts, n, [](__half a, __half b) { return __float2half(__half2float(a) + __half2float(b)); });
        case ncclBfloat16:
            return sum_into<__nv_bfloat16>(z, parts, n, [](__nv_bfloat16 a, __nv_bfloat16 b) {
                return __float2bfloat16(__bfloat162float(a) + __bfloat162float(b));
            });
    }
}

// The sum over members, in order of rank, of what each has `offset` bytes into its buffer; on member `root`.
inline void reduce_to(ncclComm_t comm, int root, const char* from, char* to, size_t n, ncclDataType_t t) {
    Group& g = group();
    const size_t bytes = n * width(t);
    if (comm->rank != root) return enqueue(g.sends, comm->peers[root], from, bytes);
    auto* parts = new std::vector<std::vector<char>>(comm->peers.size());
    for (size_t p = 0; p < comm->peers.size(); ++p) {
        (*parts)[p].resize(bytes);
        if (static_cast<int>(p) == root) std::memcpy((*parts)[p].data(), from, bytes);
        else enqueue(g.recvs, comm->peers[p], (*parts)[p].data(), bytes);
    }
    g.after.push_back([=] {
        sum(t, to, *parts, n);
        delete parts;
    });
}

inline sockaddr_un address(const ncclUniqueId& id, int rank, socklen_t& n) {
    // An abstract name: nothing is left in the file system.
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    uint64_t number = 0;
    std::memcpy(&number, id.internal, sizeof number);
    const int len = std::snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%.64s-%llx-%d", id.internal + sizeof number,
                                  static_cast<unsigned long long>(number), rank);
    n = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(len));
    return a;
}

inline bool transfer(int fd, void* data, size_t n, bool sending) {
    char* p = static_cast<char*>(data);
    while (n > 0) {
        const ssize_t m = sending ? ::send(fd, p, n, MSG_NOSIGNAL) : ::recv(fd, p, n, 0);
        if (m <= 0) return false;
        p += m;
        n -= static_cast<size_t>(m);
    }
    return true;
}

}  // namespace nccl_on_host

inline const char* ncclGetErrorString(ncclResult_t r) {
    switch (r) {
        case ncclSuccess: return "no error";
        case ncclSystemError: return "a peer is gone";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclInProgress: return "in progress";
    }
    return "unknown";
}

// As NCCL's: first the number that all connections of the job say, then where they meet.
inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    *id = {};
    char* const at = id->internal + sizeof(uint64_t);
    const size_t n = sizeof id->internal - sizeof(uint64_t);
    if (const char* meeting = std::getenv("NCCL_COMM_ID")) std::snprintf(at, n, "%s", meeting);
    else std::snprintf(at, n, "nccl-on-host-%ld-%p", static_cast<long>(::getpid()), static_cast<void*>(id));
    return ncclSuccess;
}

inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int n, ncclUniqueId id, int rank, ncclConfig_t* config) {
    using namespace nccl_on_host;
    if (n < 1 || rank < 0 || rank >= n || config == nullptr || config->blocking != 0) return ncclInvalidArgument;
    auto* comm = new ncclComm{rank, std::vector<int>(static_cast<size_t>(n), -1), true, id, -1, 0, kLooks, false};
    *out = comm;
    comm->never = rank == rank_of("NCCL_ON_HOST_ABSENT");
    if (n == 1 || comm->never) return ncclInProgress;
    socklen_t len = 0;
    comm->listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    const sockaddr_un own = address(id, rank, len);
    if (::bind(comm->listener, reinterpret_cast<const sockaddr*>(&own), len) != 0 || ::listen(comm->listener, n) != 0)
        return ncclSystemError;
    return ncclInProgress;
}

namespace nccl_on_host {

// Meets whoever has come: those of lower rank are gone to, the others come.
inline ncclResult_t meet(ncclComm_t comm) {
    if (comm->listener < 0) return ncclSuccess;
    socklen_t len = 0;
    for (int peer = 0; peer < comm->rank; ++peer) {
        if (comm->peers[static_cast<size_t>(peer)] >= 0) continue;
        const sockaddr_un there = address(comm->id, peer, len);
        const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
        if (::connect(fd, reinterpret_cast<const sockaddr*>(&there), len) != 0) {
            ::close(fd);
            continue;
        }
        if (!transfer(fd, &comm->rank, sizeof comm->rank, true)) return ncclSystemError;
        comm->peers[static_cast<size_t>(peer)] = fd;
        ++comm->n_there;
    }
    for (int fd; (fd = ::accept(comm->listener, nullptr, nullptr)) >= 0; ++comm->n_there) {
        int peer = 0;
        if (!transfer(fd, &peer, sizeof peer, false)) return ncclSystemError;
        comm->peers[static_cast<size_t>(peer)] = fd;
    }
    if (comm->n_there + 1 < static_cast<int>(comm->peers.size())) return ncclInProgress;
    ::close(comm->listener);
    comm->listener = -1;
    return ncclSuccess;
}

}  // namespace nccl_on_host

inline ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* state);

namespace nccl_on_host {

// Whether a call is left to the launches of a graph, which is being recorded; of a stream that the graph has.
template <typename Call>
bool is_recorded(cudaStream_t s, Call call) {
    if (cuda_on_host_graph == nullptr) return false;
    const auto checked = [call] { if (const ncclResult_t r = call(); r != ncclSuccess && r != ncclInProgress) std::abort(); };
    if (cuda_on_host_ask(s, checked) != cudaSuccess) std::abort();
    return true;
}

}  // namespace nccl_on_host

inline ncclResult_t ncclGroupStart() {
    if (nccl_on_host::is_recorded(cuda_on_host_graph ? cuda_on_host_graph->streams.front() : nullptr, ncclGroupStart)) return ncclSuccess;
    ++nccl_on_host::group().depth;
    return ncclSuccess;
}
inline ncclResult_t ncclGroupEnd() {
    // The streams of a graph are synchronous too.
    const auto until_done = [] {
        const std::vector<ncclComm_t> comms = nccl_on_host::group().comms;
        ncclResult_t state = ncclGroupEnd();
        for (ncclComm_t c : comms)
            for (state = ncclInProgress; state == ncclInProgress;) ncclCommGetAsyncError(c, &state);
        return state;
    };
    if (nccl_on_host::is_recorded(cuda_on_host_graph ? cuda_on_host_graph->streams.front() : nullptr, until_done)) return ncclSuccess;
    nccl_on_host::Group& g = nccl_on_host::group();
    if (g.depth == 0) return ncclInvalidUsage;
    --g.depth;
    return g.comms.empty() ? ncclSuccess : nccl_on_host::done();
}

inline ncclResult_t ncclSend(const void* data, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    if (nccl_on_host::is_recorded(s, [=] { return ncclSend(data, n, t, peer, c, s); })) return ncclSuccess;
    if (peer < 0 || peer >= static_cast<int>(c->peers.size()) || peer == c->rank) return ncclInvalidArgument;
    if (!nccl_on_host::ask(c)) return ncclInvalidUsage;
    nccl_on_host::enqueue(nccl_on_host::group().sends, c->peers[static_cast<size_t>(peer)], data, n * nccl_on_host::width(t));
    return nccl_on_host::done();
}
inline ncclResult_t ncclRecv(void* data, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    if (nccl_on_host::is_recorded(s, [=] { return ncclRecv(data, n, t, peer, c, s); })) return ncclSuccess;
    if (peer < 0 || peer >= static_cast<int>(c->peers.size()) || peer == c->rank) return ncclInvalidArgument;
    if (!nccl_on_host::ask(c)) return ncclInvalidUsage;
    nccl_on_host::enqueue(nccl_on_host::group().recvs, c->peers[static_cast<size_t>(peer)], data, n * nccl_on_host::width(t));
    return nccl_on_host::done();
}

inline ncclResult_t ncclAllGather(const void* from, void* to, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    if (nccl_on_host::is_recorded(s, [=] { return ncclAllGather(from, to, n, t, c, s); })) return ncclSuccess;
    using namespace nccl_on_host;
    if (!ask(c)) return ncclInvalidUsage;
    const size_t bytes = n * width(t);
    for (size_t p = 0; p < c->peers.size(); ++p) {
        char* there = static_cast<char*>(to) + p * bytes;
        if (static_cast<int>(p) == c->rank) {
            if (bytes > 0) std::memmove(there, from, bytes);
            continue;
        }
        enqueue(group().sends, c->peers[p], from, bytes);
        enqueue(group().recvs, c->peers[p], there, bytes);
    }
    return done();
}

inline ncclResult_t ncclReduce(const void* from, void* to, size_t n, ncclDataType_t t, ncclRedOp_t op, int root,
                               ncclComm_t c, cudaStream_t s) {
    if (nccl_on_host::is_recorded(s, [=] { return ncclReduce(from, to, n, t, op, root, c, s); })) return ncclSuccess;
    if (root < 0 || root >= static_cast<int>(c->peers.size())) return ncclInvalidArgument;
    if (!nccl_on_host::ask(c)) return ncclInvalidUsage;
    nccl_on_host::reduce_to(c, root, static_cast<const char*>(from), static_cast<char*>(to), n, t);
    return nccl_on_host::done();
}

inline ncclResult_t ncclReduceScatter(const void* from, void* to, size_t n, ncclDataType_t t, ncclRedOp_t op,
                                      ncclComm_t c, cudaStream_t s) {
    if (nccl_on_host::is_recorded(s, [=] { return ncclReduceScatter(from, to, n, t, op, c, s); })) return ncclSuccess;
    using namespace nccl_on_host;
    if (!ask(c)) return ncclInvalidUsage;
    for (size_t root = 0; root < c->peers.size(); ++root)
        reduce_to(c, static_cast<int>(root), static_cast<const char*>(from) + root * n * width(t),
                  static_cast<char*>(to), n, t);
    return done();
}

inline ncclResult_t ncclAllReduce(const void* from, void* to, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                                  cudaStream_t s) {
    if (nccl_on_host::is_recorded(s, [=] { return ncclAllReduce(from, to, n, t, op, c, s); })) return ncclSuccess;
    using namespace nccl_on_host;
    if (!ask(c)) return ncclInvalidUsage;
    // Every member sums for itself, in the same order, so all have the same bits.
    auto* parts = new std::vector<std::vector<char>>(c->peers.size());
    const size_t bytes = n * width(t);
    for (size_t p = 0; p < c->peers.size(); ++p) {
        (*parts)[p].resize(bytes);
        if (static_cast<int>(p) == c->rank) {
            if (bytes > 0) std::memcpy((*parts)[p].data(), from, bytes);
            continue;
        }
        enqueue(group().recvs, c->peers[p], (*parts)[p].data(), bytes);
    }
    char* const own = (*parts)[static_cast<size_t>(c->rank)].data();
    for (size_t p = 0; p < c->peers.size(); ++p)
        if (static_cast<int>(p) != c->rank) enqueue(group().sends, c->peers[p], own, bytes);
    group().after.push_back([=] {
        sum(t, static_cast<char*>(to), *parts, n);
        delete parts;
    });
    return done();
}

// A rank of this color is in no part, and its place is null.
#define NCCL_SPLIT_NOCOLOR (-1)

// The place of a part is written when the one that is split is ready.
inline ncclResult_t ncclCommSplit(ncclComm_t world, int color, int key, ncclComm_t* out, ncclConfig_t* config) {
    using namespace nccl_on_host;
    if (config == nullptr || config->blocking != 0) return ncclInvalidArgument;
    const size_t n = world->peers.size();
    struct Seat {
        int color, key;
    };
    auto* const seats = new std::vector<Seat>(n + 1);
    seats->back() = {color, key};
    if (world->rank == rank_of("NCCL_ON_HOST_ABSENT_PART")) {
        world->never = true;
        return ncclInProgress;
    }
    const ncclResult_t status = ncclAllGather(&seats->back(), seats->data(), sizeof(Seat), ncclInt8, world, nullptr);
    if (status != ncclInProgress) return status;
    group().after.push_back([=] {
        std::vector<size_t> members;
        for (size_t p = 0; p < n; ++p) {
            if ((*seats)[p].color != color) continue;
            size_t at = members.size();
            while (at > 0 && (*seats)[members[at - 1]].key > (*seats)[p].key) --at;
            members.insert(members.begin() + static_cast<long>(at), p);
        }
        delete seats;
        if (color == NCCL_SPLIT_NOCOLOR) {
            *out = nullptr;
            return;
        }
        auto* comm = new ncclComm{0, {}, false, {}, -1, static_cast<int>(members.size()) - 1, kLooks, false};
        for (size_t i = 0; i < members.size(); ++i) {
            if (static_cast<int>(members[i]) == world->rank) comm->rank = static_cast<int>(i);
            comm->peers.push_back(world->peers[members[i]]);
        }
        *out = comm;
    });
    return ncclInProgress;
}

// After so many looks at a device that stopped something has failed in the background, as NCCL_ON_HOST_BREAKS says.
inline ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* state) {
    using namespace nccl_on_host;
    static const char* const breaks = std::getenv("NCCL_ON_HOST_BREAKS");
    static long left = breaks != nullptr ? std::atol(breaks) : 0;
    const std::vector<ncclComm_t>& asked = group().comms;
    *state = meet(c);
    if (*state == ncclSuccess && std::find(asked.begin(), asked.end(), c) != asked.end()) *state = go_on();
    if (*state == ncclSuccess && c->looks > 0 && --c->looks > 0) *state = ncclInProgress;
    if (c->never) *state = ncclInProgress;
    if (*state == ncclSuccess && breaks != nullptr && cuda_on_host_stopped && left-- <= 0) *state = ncclSystemError;
    return ncclSuccess;
}

inline ncclResult_t ncclCommFinalize(ncclComm_t c) {
    if (c->looks > 0) return ncclInvalidUsage;
    c->looks = nccl_on_host::kLooks;
    return ncclInProgress;
}

inline ncclResult_t ncclCommDestroy(ncclComm_t c) {
    for (int fd : c->peers)
        if (c->owns && fd >= 0) ::close(fd);
    delete c;
    return ncclSuccess;
}

inline ncclResult_t ncclCommAbort(ncclComm_t c) { return ncclCommDestroy(c); }
