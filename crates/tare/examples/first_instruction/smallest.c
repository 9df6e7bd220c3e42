// SPDX-License-Identifier: Apache-2.0
// The smallest monitor: the ioctls that `tare run --console serial --no-rng` makes for one vCPU, and nothing else. It puts
// a guest of a few instructions (the file named on the command line) at 2 MiB, starts it in 64-bit mode and prints what the
// guest writes to port 0x3f8, until the guest writes to port 0x600. `first_instruction` starts it beside tare.

#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define RAM (64ul << 20)
#define ENTRY 0x200000ul
#define TABLES 0x9000ul
#define GDT 0x500ul

static int vcpu, done;
static struct kvm_run *run;

static void need(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

#define CALL(fd, request, argument) need(ioctl(fd, request, argument) >= 0, #request)

static void *run_vcpu(void *unused) {
    (void)unused;
    for (;;) {
        need(ioctl(vcpu, KVM_RUN, 0) >= 0, "KVM_RUN");
        need(run->exit_reason == KVM_EXIT_IO && run->io.direction == KVM_EXIT_IO_OUT, "an exit that is no port write");
        if (run->io.port == 0x3f8) need(write(1, (char *)run + run->io.data_offset, 1) == 1, "write");
        if (run->io.port == 0x600) {
            uint64_t one = 1;
            need(write(done, &one, 8) == 8, "write");
            return NULL;
        }
    }
}

static void tables(uint8_t *ram) {
    uint64_t *page = (uint64_t *)(ram + TABLES), *gdt = (uint64_t *)(ram + GDT);
    page[0] = (TABLES + 4096) | 3;
    page[512] = (TABLES + 8192) | 3;
    for (uint64_t i = 0; i < 512; i++) page[1024 + i] = i << 21 | 0x83;
    gdt[2] = 0x00af9b000000ffff;
    gdt[3] = 0x00cf93000000ffff;
    gdt[4] = 0x00008b0000000067;
}

static void registers(void) {
    struct kvm_sregs s;
    struct kvm_regs r = {.rip = ENTRY, .rflags = 2};
    CALL(vcpu, KVM_GET_SREGS, &s);
    struct kvm_segment code = {.limit = ~0u, .selector = 0x10, .type = 11, .present = 1, .s = 1, .g = 1, .l = 1};
    struct kvm_segment data = code;
    data.selector = 0x18, data.type = 3, data.l = 0, data.db = 1;
    s.cs = code;
    s.ds = s.es = s.fs = s.gs = s.ss = data;
    s.tr = (struct kvm_segment){.limit = 0x67, .selector = 0x20, .type = 11, .present = 1};
    s.gdt.base = GDT, s.gdt.limit = 47;
    s.idt.base = s.idt.limit = 0;
    s.cr0 = 1 | 1 << 4 | 1ul << 31, s.cr3 = TABLES, s.cr4 |= 1 << 5, s.efer |= 1 << 8 | 1 << 10;
    CALL(vcpu, KVM_SET_SREGS, &s);
    CALL(vcpu, KVM_SET_REGS, &r);
}

static void msr(unsigned index, uint64_t data) {
    struct {
        struct kvm_msrs head;
        struct kvm_msr_entry entry;
    } one = {.head.nmsrs = 1, .entry = {.index = index, .data = data}};
    CALL(vcpu, KVM_SET_MSRS, &one);
}

int main(int argc, char **argv) {
    int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC), guest = argc > 1 ? open(argv[1], O_RDONLY) : -1;
    need(kvm >= 0, "/dev/kvm");
    need(guest >= 0, "the guest");
    need(ioctl(kvm, KVM_GET_API_VERSION, 0) == KVM_API_VERSION, "KVM_GET_API_VERSION");
    int caps[] = {KVM_CAP_IRQCHIP, KVM_CAP_IRQFD, KVM_CAP_IOEVENTFD, KVM_CAP_USER_MEMORY, KVM_CAP_IMMEDIATE_EXIT,
                  KVM_CAP_TSC_DEADLINE_TIMER, KVM_CAP_MAX_VCPUS};
    for (unsigned i = 0; i < sizeof caps / sizeof *caps; i++) ioctl(kvm, KVM_CHECK_EXTENSION, caps[i]);
    int vm = ioctl(kvm, KVM_CREATE_VM, 0);
    need(vm >= 0, "KVM_CREATE_VM");
    uint8_t *ram = mmap(0, RAM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(ram != MAP_FAILED, "mmap");
    madvise(ram, RAM, MADV_HUGEPAGE);
    struct kvm_userspace_memory_region slot = {.memory_size = RAM, .userspace_addr = (uint64_t)ram};
    CALL(vm, KVM_SET_USER_MEMORY_REGION, &slot);
    uint64_t identity = 0xfeffc000;
    CALL(vm, KVM_SET_IDENTITY_MAP_ADDR, &identity);
    CALL(vm, KVM_SET_TSS_ADDR, 0xfeffd000ul);
    struct kvm_enable_cap split = {.cap = KVM_CAP_SPLIT_IRQCHIP, .args = {24}};
    CALL(vm, KVM_ENABLE_CAP, &split);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    done = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    tables(ram);
    need(pread(guest, ram + ENTRY, 4096, 0) > 0, "the guest's code");

    static struct {
        struct kvm_cpuid2 head;
        struct kvm_cpuid_entry2 entries[256];
    } cpuid = {.head.nent = 256};
    CALL(kvm, KVM_GET_SUPPORTED_CPUID, &cpuid);
    vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
    need(vcpu >= 0, "KVM_CREATE_VCPU");
    int size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
    run = mmap(0, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
    need(run != MAP_FAILED, "mmap of the run page");
    ioctl(vcpu, KVM_GET_TSC_KHZ, 0);
    CALL(vcpu, KVM_SET_CPUID2, &cpuid);
    for (unsigned i = 0; i < cpuid.head.nent; i++) {
        struct kvm_cpuid_entry2 *leaf = &cpuid.entries[i];
        struct kvm_xcrs xcrs = {.nr_xcrs = 1, .xcrs[0].value = (uint64_t)leaf->edx << 32 | leaf->eax};
        if (leaf->function == 0xd && leaf->index == 0 && leaf->eax) CALL(vcpu, KVM_SET_XCRS, &xcrs);
    }
    msr(0x1a0, 1);
    msr(0x2ff, 1 << 11 | 6);
    uint64_t banks = 1;
    CALL(vcpu, KVM_X86_SETUP_MCE, &banks);
    registers();

    int events = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN};
    need(epoll_ctl(events, EPOLL_CTL_ADD, done, &event) == 0 && epoll_ctl(events, EPOLL_CTL_ADD, timer, &event) == 0, "epoll");
    pthread_t thread;
    need(pthread_create(&thread, NULL, run_vcpu, NULL) == 0, "pthread_create");
    need(epoll_wait(events, &event, 1, -1) == 1, "epoll_wait");
    pthread_join(thread, NULL);
    return 0;
}
