#include "context.h"

#if !defined(EMU_UCONTEXT)

// The last jump goes through a register: `ret` would be mispredicted every time, because the return
// stack of the processor still holds the caller that was left.
asm(R"(
    .text
    .p2align 4
    .globl emu_switch_stack
    .hidden emu_switch_stack
    .type emu_switch_stack, @function
emu_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rdx
    jmpq *%rdx
    .size emu_switch_stack, .-emu_switch_stack
)");

#endif
