// What the kernel includes, before any target attribute: those would spoil the library's functions.
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
