// Includes of the kernel, before any target attribute: the attribute would spoil library functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "rows.h"
