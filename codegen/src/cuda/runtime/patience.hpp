// How long something is waited for, and how often it is looked at: nothing here waits inside a library that cannot be told to
// stop.
#pragma once

#include <chrono>
#include <string>
#include <thread>

namespace ithaca {

// A wait, looked at again and again.
class Patience {
  public:
    // It begins now, and may last so many seconds without anything going on.
    explicit Patience(double seconds) : seconds_(seconds) {}

    // Something went on.
    void renew() { since_ = Clock::now(); }

    // Lets some time pass before the next look; false where it has been longer than allowed.
    bool pause() const {
        const double waited = this->waited();
        if (waited > seconds_) return false;
        if (waited < kEager) std::this_thread::yield();
        else std::this_thread::sleep_for(kRare);
        return true;
    }

    // What is said where it was too long.
    std::string complaint() const { return "it has not ended after " + std::to_string(waited()) + " s"; }

  private:
    using Clock = std::chrono::steady_clock;
    // For so many seconds a look follows the other at once: most tasks are over by then.
    static constexpr double kEager = 0.02;
    static constexpr std::chrono::microseconds kRare{100};

    double waited() const { return std::chrono::duration<double>(Clock::now() - since_).count(); }

    double seconds_;
    Clock::time_point since_ = Clock::now();
};

}  // namespace ithaca
