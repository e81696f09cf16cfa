/* System calls without libc, for the processes that share the agent's memory (see supervisor.c): they must not touch
 * errno, locks or anything else that lives in the agent's thread-local storage. All return -errno on failure. */
#ifndef K8E_RAW_H
#define K8E_RAW_H

#include <stdint.h>
#include <sys/syscall.h>

/* Compiled without sanitizers: their bookkeeping assumes stacks and exits that these processes do not have. */
#define RAW __attribute__((no_sanitize("address"), no_sanitize("undefined")))

RAW static inline long raw6(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory", "cc");
    return x0;
#else
#error "x86_64 and aarch64 only"
#endif
}

#define raw(...) RAW_CALL(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)
#define RAW_CALL(number, a, b, c, d, e, f, ...) \
    raw6(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

/* A new process that runs function(argument) on a stack of its own and exits with what it returns. */
RAW static inline long raw_clone(unsigned long flags, void *stack_top, int (*function)(void *), void *argument)
{
    void **stack = stack_top;
    *--stack = argument;
    *--stack = (void *)(uintptr_t)function;
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = 0;
    register long r8 __asm__("r8") = 0;
    __asm__ volatile("syscall\n\t"
                     "test %%rax, %%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp, %%ebp\n\t"
                     "pop %%rax\n\t"
                     "pop %%rdi\n\t"
                     "call *%%rax\n\t"
                     "mov %%eax, %%edi\n\t"
                     "mov %[exit], %%eax\n\t"
                     "syscall\n\t"
                     "hlt\n"
                     "1:"
                     : "=a"(result)
                     : "a"((long)SYS_clone), "D"(flags), "S"(stack), "d"(0L), "r"(r10), "r"(r8), [exit] "i"(SYS_exit)
                     : "rcx", "r11", "memory", "cc");
    return result;
#else
    register long x8 __asm__("x8") = SYS_clone;
    register long x0 __asm__("x0") = (long)flags;
    register long x1 __asm__("x1") = (long)stack;
    register long x2 __asm__("x2") = 0;
    register long x3 __asm__("x3") = 0;
    register long x4 __asm__("x4") = 0;
    __asm__ volatile("svc #0\n\t"
                     "cbnz x0, 1f\n\t"
                     "mov x29, xzr\n\t"
                     "ldp x1, x0, [sp], #16\n\t"
                     "blr x1\n\t"
                     "mov x8, %[exit]\n\t"
                     "svc #0\n\t"
                     "brk #0\n"
                     "1:"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), [exit] "i"(SYS_exit)
                     : "memory", "cc", "x30");
    return x0;
#endif
}

#endif
