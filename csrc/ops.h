// Every compiled op with its contract: the table of contents of csrc/.
#pragma once

#include <cstdint>
