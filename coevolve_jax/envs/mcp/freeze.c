/* Freezes the clock of a program, and the random numbers that it takes from the kernel: LD_PRELOAD.
 *
 * COEVOLVE_NOW: the seconds since 1970 that every clock of the day shows. Clocks that measure durations go on,
 * so that nothing waits for ever.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t now(void) {
    const char *seconds = getenv("COEVOLVE_NOW");
    return seconds ? (time_t)atoll(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE && clock != CLOCK_TAI)
        return (int)syscall(SYS_clock_gettime, clock, found);
    found->tv_sec = now();
    found->tv_nsec = 0;
    return 0;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    (void)zone;
    found->tv_sec = now();
    found->tv_usec = 0;
    return 0;
}

int timespec_get(struct timespec *found, int base) {
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, found) ? base : 0;
}

time_t time(time_t *found) {
    time_t seconds = now();
    if (found)
        *found = seconds;
    return seconds;
}

/* splitmix64, one byte at a time: the same sequence in every process. */
ssize_t getrandom(void *bytes, size_t length, unsigned int flags) {
    static uint64_t state = 0;
    (void)flags;
    for (size_t i = 0; i < length; i++) {
        uint64_t z = (state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        ((unsigned char *)bytes)[i] = (unsigned char)(z ^ (z >> 31));
    }
    return (ssize_t)length;
}

int getentropy(void *bytes, size_t length) {
    getrandom(bytes, length, 0);
    return 0;
}
