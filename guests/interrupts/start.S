/* SPDX-License-Identifier: Apache-2.0 */
/* Entry of the measuring guest by PVH (32-bit, paging off, ebx = start info), which tare and QEMU both know: identity-mapped
 * long mode for the first 4 GiB, then main(). Interrupt stubs save what C may change and pass the vector on. */

	.section .note.pvh, "a", @note
	.long 4, 4, 18			/* XEN_ELFNOTE_PHYS32_ENTRY */
	.asciz "Xen"
	.long start

	.section .text.start, "ax"
	.code32
	.globl start
start:
	cld
	movl $stack_top, %esp
	movl %ebx, %ebp
	/* Four directories of 2 MiB pages, which a PDPT and a PML4 of one entry each lead to. */
	movl $directories, %edi
	movl $0x83, %eax
1:	movl %eax, (%edi)
	movl $0, 4(%edi)
	addl $0x200000, %eax
	addl $8, %edi
	cmpl $directories + 4 * 4096, %edi
	jne 1b
	movl $directories + 3, %eax
	movl $pdpt, %edi
2:	movl %eax, (%edi)
	addl $4096, %eax
	addl $8, %edi
	cmpl $pdpt + 32, %edi
	jne 2b
	movl $pdpt + 3, pml4
	movl $pml4, %eax
	movl %eax, %cr3
	movl %cr4, %eax
	orl $0x20, %eax
	movl %eax, %cr4
	movl $0xc0000080, %ecx
	rdmsr
	orl $0x100, %eax
	wrmsr
	lgdt gdt_pointer
	movl %cr0, %eax
	orl $0x80000001, %eax
	movl %eax, %cr0
	ljmp $8, $long_mode
	.code64
long_mode:
	movl $16, %eax
	movl %eax, %ds
	movl %eax, %es
	movl %eax, %ss
	movl %eax, %fs
	movl %eax, %gs
	movl %ebp, %edi
	call main
3:	hlt
	jmp 3b

	.macro stub name vector
	.globl \name
\name:
	pushq %rax
	pushq %rcx
	pushq %rdx
	pushq %rsi
	pushq %rdi
	pushq %r8
	pushq %r9
	pushq %r10
	pushq %r11
	movl $\vector, %edi
	cld
	call interrupt
	popq %r11
	popq %r10
	popq %r9
	popq %r8
	popq %rdi
	popq %rsi
	popq %rdx
	popq %rcx
	popq %rax
	iretq
	.endm

	.text
	stub on_line 0x40
	stub on_spurious 0xff
	.globl on_exception
on_exception:
	cld
	movq (%rsp), %rdi
	movq 8(%rsp), %rsi
	call fail

	.data
	.balign 8
gdt:	.quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff
gdt_pointer:
	.word 23
	.long gdt

	.bss
	.balign 4096
pml4:	.skip 4096
pdpt:	.skip 4096
directories: .skip 4 * 4096
	.skip 16384
stack_top:
	.section .note.GNU-stack, "", @progbits
