// NCCL for one process whose ranks are on the host, as a library to open at run time: what a group of calls asks for is done
// when the group ends, on memory that is memory. Nothing blocks: communicators and their parts are there after some looks, and
// the handle of a part is written then, as NCCL does it from threads of its own.
//
// Compiled with ABSENT_RANK, that rank never comes into the communicator of all; with ABSENT_PART, it never comes into a
// part; with BROKEN_RANK, its communicators fail in the background after BROKEN_AFTER groups.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#ifndef ABSENT_RANK
#define ABSENT_RANK -1
#endif
#ifndef ABSENT_PART
#define ABSENT_PART -1
#endif
#ifndef BROKEN_RANK
#define BROKEN_RANK -1
#endif
#ifndef BROKEN_AFTER
#define BROKEN_AFTER 0
#endif

namespace {

enum Status { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };
constexpr int kLooks = 2;

struct Communicator;

struct Split {
    Communicator* of;
    int color, key;
    Communicator** out;
};

// The ranks of a communicator.
struct Team {
    size_t n = 0;
    std::map<int, Communicator*> members;
    std::vector<Split> splits;
};

struct Communicator {
    Team* team;
    int rank, world_rank;
    int looks = 0;  // until it is ready, once all are there
    bool is_splitting = false;
};

enum class What { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, AllToAll };

struct Call {
    Communicator* by;
    What what;
    const char* from;
    char* to;
    size_t n;
    int type, root;
};
struct Message {
    Communicator* by;
    int peer;
    char* at;
    size_t bytes;
};

int depth = 0, n_groups = 0;
std::vector<Call> calls;
std::deque<Message> sends, recvs;
std::map<std::string, Team*>& teams() {
    static std::map<std::string, Team*> all;
    return all;
}

size_t width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return widths[type];
}

template <typename T>
void add(char* sum, const char* x, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        T a, b;
        std::memcpy(&a, sum + i * sizeof(T), sizeof(T));
        std::memcpy(&b, x + i * sizeof(T), sizeof(T));
        a += b;
        std::memcpy(sum + i * sizeof(T), &a, sizeof(T));
    }
}

// The sum of what all have `first` elements behind their beginnings; none of a type that nobody sums here.
bool sum_of(const std::vector<const Call*>& team, size_t first, size_t n, std::vector<char>& sum) {
    const int type = team[0]->type;
    const size_t bytes = width(type);
    sum.assign(team[0]->from + first * bytes, team[0]->from + (first + n) * bytes);
    for (size_t i = 1; i < team.size(); ++i) {
        const char* const x = team[i]->from + first * bytes;
        if (type == 7) add<float>(sum.data(), x, n);
        else if (type == 8) add<double>(sum.data(), x, n);
        else return false;
    }
    return true;
}

// One collective of all members, in order of ranks.
bool collective(const std::vector<const Call*>& team) {
    const Call& one = *team[0];
    const size_t bytes = width(one.type), n = one.n;
    std::vector<std::vector<char>> results(team.size());
    for (size_t i = 0; i < team.size(); ++i) {
        std::vector<char>& result = results[i];
        switch (one.what) {
            case What::AllReduce:
                if (!sum_of(team, 0, n, result)) return false;
                break;
            case What::Reduce:
                if (static_cast<int>(i) == one.root && !sum_of(team, 0, n, result)) return false;
                break;
            case What::ReduceScatter:
                if (!sum_of(team, i * n, n, result)) return false;
                break;
            case What::Broadcast: {
                const char* const from = team[static_cast<size_t>(one.root)]->from;
                result.assign(from, from + n * bytes);
                break;
            }
            case What::AllGather:
                for (const Call* peer : team) result.insert(result.end(), peer->from, peer->from + n * bytes);
                break;
            case What::AllToAll:
                for (const Call* peer : team)
                    result.insert(result.end(), peer->from + i * n * bytes, peer->from + (i + 1) * n * bytes);
                break;
        }
    }
    for (size_t i = 0; i < team.size(); ++i)
        if (!results[i].empty()) std::memcpy(team[i]->to, results[i].data(), results[i].size());
    return true;
}

int run() {
    ++n_groups;
    while (!calls.empty()) {
        Team* const team = calls[0].by->team;
        std::vector<const Call*> together(team->n, nullptr);
        std::vector<bool> is_taken(calls.size(), false);
        for (size_t i = 0; i < calls.size(); ++i) {
            const Call& call = calls[i];
            const Call*& place = together[static_cast<size_t>(call.by->rank)];
            if (call.by->team != team || place != nullptr) continue;
            place = &call;
            is_taken[i] = true;
        }
        for (const Call* call : together)
            if (call == nullptr || call->what != together[0]->what || call->n != together[0]->n) return kInvalidUsage;
        if (!collective(together)) return kInvalidArgument;
        std::vector<Call> left;
        for (size_t i = 0; i < calls.size(); ++i)
            if (!is_taken[i]) left.push_back(calls[i]);
        calls = left;
    }
    // All is read before anything is written.
    std::vector<std::pair<char*, std::vector<char>>> arrived;
    for (const Message& recv : recvs) {
        bool is_there = false;
        for (auto send = sends.begin(); send != sends.end(); ++send) {
            if (send->by->team != recv.by->team || send->by->rank != recv.peer || send->peer != recv.by->rank) continue;
            if (send->bytes != recv.bytes) return kInvalidUsage;
            arrived.emplace_back(recv.at, std::vector<char>(send->at, send->at + send->bytes));
            sends.erase(send);
            is_there = true;
            break;
        }
        if (!is_there) return kInvalidUsage;
    }
    recvs.clear();
    if (!sends.empty()) return kInvalidUsage;
    for (const auto& [to, data] : arrived) std::memcpy(to, data.data(), data.size());
    return kSuccess;
}

int issued() { return depth > 0 ? kSuccess : run(); }

int call(Communicator* by, What what, const void* from, void* to, size_t n, int type, int root) {
    calls.push_back({by, what, static_cast<const char*>(from), static_cast<char*>(to), n, type, root});
    return issued();
}

void split(Team* parent) {
    std::map<int, std::map<std::pair<int, int>, Split*>> by_color;
    for (Split& one : parent->splits) by_color[one.color][{one.key, one.of->rank}] = &one;
    for (auto& [color, members] : by_color) {
        auto* const team = new Team;
        team->n = members.size();
        for (auto& [place, one] : members) {
            const int rank = static_cast<int>(team->members.size());
            team->members[rank] = new Communicator{team, rank, one->of->world_rank, kLooks, false};
            one->of->is_splitting = false;
            if (color >= 0) *one->out = team->members[rank];
        }
    }
    parent->splits.clear();
}

}  // namespace

struct Id {
    char internal[128];
};

extern "C" {

int ncclGetVersion(int* version) {
    *version = 23003;
    return kSuccess;
}
const char* ncclGetErrorString(int status) { return status == kSuccess ? "no error" : "an error of the double"; }
const char* ncclGetLastError(Communicator*) { return ""; }
int ncclGetUniqueId(Id* id) {
    static int n = 0;
    std::snprintf(id->internal, sizeof id->internal, "%d", n++);
    return kSuccess;
}

int ncclCommInitRankConfig(Communicator** out, int n, Id id, int rank, void*) {
    Team*& team = teams()[id.internal];
    if (team == nullptr) team = new Team;
    team->n = static_cast<size_t>(n);
    *out = new Communicator{team, rank, rank, kLooks, false};
    if (rank != ABSENT_RANK) team->members[rank] = *out;
    return kInProgress;
}
int ncclCommInitRank(Communicator** out, int n, Id id, int rank) {
    const int status = ncclCommInitRankConfig(out, n, id, rank, nullptr);
    return status == kInProgress ? kSuccess : status;
}
int ncclCommSplit(Communicator* of, int color, int key, Communicator** out, void*) {
    *out = nullptr;
    of->is_splitting = true;
    of->looks = kLooks;
    if (of->rank != ABSENT_PART) of->team->splits.push_back({of, color, key, out});
    return kInProgress;
}
int ncclCommGetAsyncError(Communicator* of, int* status) {
    Team* const team = of->team;
    if (team->splits.size() == team->n) split(team);
    const bool is_there = team->members.size() == team->n && !of->is_splitting;
    if (is_there && of->looks > 0) --of->looks;
    *status = is_there && of->looks == 0 ? kSuccess : kInProgress;
    if (of->world_rank == BROKEN_RANK && n_groups > BROKEN_AFTER) *status = kSystemError;
    return kSuccess;
}
int ncclCommCount(Communicator* of, int* n) {
    *n = static_cast<int>(of->team->n);
    return kSuccess;
}
int ncclCommUserRank(Communicator* of, int* rank) {
    *rank = of->rank;
    return kSuccess;
}
int ncclCommFinalize(Communicator* of) {
    of->looks = kLooks;
    return kInProgress;
}
int ncclCommDestroy(Communicator* of) {
    of->team->members[of->rank] = nullptr;
    delete of;
    return kSuccess;
}
int ncclCommAbort(Communicator* of) { return ncclCommDestroy(of); }

int ncclGroupStart() {
    ++depth;
    return kSuccess;
}
int ncclGroupEnd() {
    if (depth == 0) return kInvalidUsage;
    --depth;
    return issued();
}

int ncclAllReduce(const void* from, void* to, size_t n, int type, int, Communicator* by, void*) {
    return call(by, What::AllReduce, from, to, n, type, 0);
}
int ncclReduce(const void* from, void* to, size_t n, int type, int, int root, Communicator* by, void*) {
    return call(by, What::Reduce, from, to, n, type, root);
}
int ncclBroadcast(const void* from, void* to, size_t n, int type, int root, Communicator* by, void*) {
    return call(by, What::Broadcast, from, to, n, type, root);
}
int ncclAllGather(const void* from, void* to, size_t n, int type, Communicator* by, void*) {
    return call(by, What::AllGather, from, to, n, type, 0);
}
int ncclReduceScatter(const void* from, void* to, size_t n, int type, int, Communicator* by, void*) {
    return call(by, What::ReduceScatter, from, to, n, type, 0);
}
int ncclAlltoAll(const void* from, void* to, size_t n, int type, Communicator* by, void*) {
    return call(by, What::AllToAll, from, to, n, type, 0);
}
int ncclSend(const void* from, size_t n, int type, int peer, Communicator* by, void*) {
    sends.push_back({by, peer, const_cast<char*>(static_cast<const char*>(from)), n * width(type)});
    return issued();
}
int ncclRecv(void* to, size_t n, int type, int peer, Communicator* by, void*) {
    recvs.push_back({by, peer, static_cast<char*>(to), n * width(type)});
    return issued();
}

}  // extern "C"
