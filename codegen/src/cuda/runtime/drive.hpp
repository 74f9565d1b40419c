// The command line of an emitted program, which drive.cpp defines.
#pragma once

#include "device.hpp"

namespace ithaca {

// Runs the program; without a reference it cannot check itself. The status of the process.
int drive(int argc, char** argv, const Program& program, const Program* reference);

}  // namespace ithaca
