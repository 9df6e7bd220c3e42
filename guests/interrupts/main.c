// SPDX-License-Identifier: Apache-2.0
// The measuring guest: takes interrupts one after another from one of four controllers, answers each with the eight register
// accesses of the study, and says what that took in time-stamp ticks, injection and response apart. What makes an interrupt come
// is the guest's own doing here, one to three exits: that is measured first, with the line masked, and is not in the injection.
// Started by PVH in tare and in QEMU; its command line says what to do:
//
//   controller=vioapic  64-line paravirtual controller (docs/vioapic.md) in the mode that its register says
//   controller=ioapic   an I/O APIC, whoever emulates it, and the serial port's interrupt (pin 4)
//   controller=message  the same edge as a plain message: nothing to ask and nothing to tell but the end of the interrupt
//   count=N             so many interrupts (1000)
//   eoi=pv|apic         the end of an interrupt through KVM's shared flag where there is one, or always through the APIC (pv)
//   marks               stands still at the end, with a mark for the lab
//
// Prints one line, then ends the machine through the debug exit at port 0xf4 (status 33; 3 after a fault), or powers it off.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

#define VECTOR 0x40
#define LINE 5
#define PIN 4

enum controller { VIOAPIC, IOAPIC, MESSAGE };

static volatile u8 *const lapic = (volatile u8 *)0xfee00000UL;
static volatile u32 *const ioapic = (volatile u32 *)0xfec00000UL;
static volatile u8 *const vioapic = (volatile u8 *)0xfec10000UL;
static volatile u64 *const words = (volatile u64 *)0xfec11000UL;
static volatile u32 *const doorbell = (volatile u32 *)0xfec12000UL;

// Registers of the paravirtual controller.
enum { MODE = 0x08, IRR = 0x10, ISR = 0x18, MASK = 0x20, UNMASK = 0x28, ACK = 0x30, RAISE = 0x38, LEVEL = 0x40, EVENT = 0x48, LINES = 0x100 };
// The guest's words.
enum { W_MASK, W_UNMASK, W_ACK };

static enum controller controller;
static int paravirtual, pv_eoi;
static volatile u64 served, spurious, entered, response, rings, skipped;
static volatile u32 eoi_flag __attribute__((aligned(64)));

struct gate { u16 low, selector; u8 ist, type; u16 middle; u32 high, zero; } __attribute__((packed));
static struct gate idt[256] __attribute__((aligned(16)));
extern void on_line(void), on_spurious(void), on_exception(void);

static inline void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port) : "memory"); }
static inline void out32(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port) : "memory"); }
static inline u8 in8(u16 port) { u8 value; __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port) : "memory"); return value; }
static inline u64 ticks(void) { u32 low, high; __asm__ volatile("rdtsc" : "=a"(low), "=d"(high)::"memory"); return (u64)high << 32 | low; }
static inline void lock_or(volatile u64 *word, u64 bits) { __asm__ volatile("lock orq %1, %0" : "+m"(*word) : "r"(bits) : "memory", "cc"); }
static inline void lock_xor(volatile u64 *word, u64 bits) { __asm__ volatile("lock xorq %1, %0" : "+m"(*word) : "r"(bits) : "memory", "cc"); }
static inline u64 get(u32 offset) { return *(volatile u64 *)(vioapic + offset); }
static inline void set(u32 offset, u64 value) { *(volatile u64 *)(vioapic + offset) = value; }

static void put(char c) { out8(0x3f8, c); }
static void say(const char *text) { while (*text) put(*text++); }

static void number(u64 value)
{
	char digits[20];
	int n = 0;
	do digits[n++] = '0' + value % 10; while (value /= 10);
	while (n) put(digits[--n]);
}

static void field(const char *name, u64 value) { say(name); number(value); }

static void __attribute__((noreturn)) end(u32 status)
{
	out32(0xf4, status);
	out8(0x600, 0x34);
	for (;;) __asm__ volatile("cli; hlt");
}

void fail(u64 first, u64 second);
void fail(u64 first, u64 second)
{
	field("interrupts failed: exception, ", first);
	field(" ", second);
	say("\n");
	end(1);
}

static void end_of_interrupt(void)
{
	u8 was = 0;
	if (pv_eoi) __asm__ volatile("btrl $0, %0; setc %1" : "+m"(eoi_flag), "=r"(was)::"memory", "cc");
	if (!was) *(volatile u32 *)(lapic + 0xb0) = 0;
	else skipped++;
}

// Eight accesses: what wants service, is it masked, mask it, acknowledge it, did that take, is it masked still, unmask it, is
// there more. In mode pv they are loads and stores but for a doorbell when there is more.
static int serve_vioapic(void)
{
	const u64 bit = 1UL << LINE;
	u64 more;
	if (paravirtual) {
		if (!((get(LEVEL) | (get(EVENT) ^ words[W_ACK])) & ~words[W_MASK] & bit)) return 0;
		lock_or(&words[W_MASK], bit);
		if ((get(EVENT) ^ words[W_ACK]) & bit) lock_xor(&words[W_ACK], bit);
		if (!(words[W_MASK] & bit)) return 0;
		lock_or(&words[W_UNMASK], bit);
		more = get(LEVEL) | (get(EVENT) ^ words[W_ACK]);
		if (more & bit) {
			*doorbell = 1;
			rings++;
		}
		return 1;
	}
	if (!(get(ISR) & bit) || get(MASK) & bit) return 0;
	set(MASK, bit);
	set(ACK, bit);
	more = get(IRR) & bit;
	if (!(get(MASK) & bit)) return 0;
	set(UNMASK, bit);
	more |= get(ISR) & bit;
	return 1 + (more != 0);
}

static u32 ioapic_read(u32 which) { ioapic[0] = which; return ioapic[4]; }

// Eight accesses: select, read, write to mask; select and read to see it; select, read, write to unmask.
static int serve_ioapic(void)
{
	u32 entry = ioapic_read(0x10 + 2 * PIN);
	ioapic[4] = entry | 1 << 16;
	if (!(ioapic_read(0x10 + 2 * PIN) & 1 << 16)) return 0;
	entry = ioapic_read(0x10 + 2 * PIN);
	ioapic[4] = entry & ~(1 << 16);
	return 1;
}

void interrupt(u32 vector);
void interrupt(u32 vector)
{
	u64 begun = ticks();
	int done = 1;
	if (vector != VECTOR) {
		spurious++;
		return;
	}
	entered = begun;
	if (controller == VIOAPIC) done = serve_vioapic();
	else if (controller == IOAPIC) done = serve_ioapic();
	if (done) served++;
	else spurious++;
	end_of_interrupt();
	response += ticks() - begun;
}

static void gate(int vector, void (*to)(void))
{
	u64 at = (u64)to;
	idt[vector] = (struct gate){ (u16)at, 8, 0, 0x8e, (u16)(at >> 16), at >> 32, 0 };
}

// The value of `name=` on the command line, or 0.
static const char *option(const char *line, const char *name)
{
	for (; *line; line++) {
		const char *a = line, *b = name;
		while (*b && *a == *b) a++, b++;
		if (!*b) return a;
	}
	return 0;
}

static void setup(const char *line)
{
	struct { u16 limit; u64 base; } __attribute__((packed)) pointer = { sizeof idt - 1, (u64)idt };
	u32 a = 0x40000001, b, c = 0, d;
	const char *eoi = option(line, "eoi=");
	for (int vector = 0; vector < 32; vector++) gate(vector, on_exception);
	gate(VECTOR, on_line);
	gate(0xff, on_spurious);
	__asm__ volatile("lidt %0" ::"m"(pointer));
	*(volatile u32 *)(lapic + 0xf0) = 0x1ff;
	// A PIC, where there is one, sees the serial port, too, and may reach LINT0: neither has a say here.
	*(volatile u32 *)(lapic + 0x350) = 1 << 16;
	out8(0x21, 0xff);
	out8(0xa1, 0xff);
	__asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
	if (!(eoi && *eoi == 'a') && a & 1 << 6) {
		u64 flag = (u64)&eoi_flag | 1;
		__asm__ volatile("wrmsr" ::"c"(0x4b564d04), "a"((u32)flag), "d"((u32)(flag >> 32)));
		pv_eoi = 1;
	}
	if (controller == VIOAPIC) {
		paravirtual = (get(MODE) & 0xff) == 2;
		set(LINES + 8 * LINE, VECTOR);
	} else {
		ioapic[0] = 0x11 + 2 * PIN;
		ioapic[4] = 0;
		ioapic[0] = 0x10 + 2 * PIN;
		ioapic[4] = 1 << 16 | VECTOR;
		// OUT2 lets the interrupt out of a serial port.
		out8(0x3fc, 0x08);
	}
}

// One event. The serial port has one whenever its transmitter's interrupt is switched on and it has nothing to transmit.
static inline void trigger(void)
{
	if (controller == VIOAPIC) {
		set(RAISE, 1UL << LINE);
		return;
	}
	out8(0x3f9, 0);
	out8(0x3f9, 2);
}

// The event is over: forgotten by the paravirtual controller, or seen by the serial port's driver.
static inline void forget(void)
{
	if (controller != VIOAPIC) in8(0x3fa);
	else if (paravirtual) lock_xor(&words[W_ACK], 1UL << LINE);
	else set(ACK, 1UL << LINE);
}

static void unmask(void)
{
	if (controller == VIOAPIC) set(UNMASK, 1UL << LINE);
	else ioapic[4] = VECTOR;
}

struct start_info { u32 magic, version, flags, modules; u64 modlist, cmdline; };

int main(const struct start_info *info);
int main(const struct start_info *info)
{
	const char *line = (const char *)info->cmdline;
	const char *which = option(line, "controller="), *many = option(line, "count=");
	u64 count = 0, causes, cause = 0, injection = 0, begun, all;
	controller = !which || *which == 'v' ? VIOAPIC : *which == 'i' ? IOAPIC : MESSAGE;
	while (many && *many >= '0' && *many <= '9') count = count * 10 + (*many++ - '0');
	if (!count) count = 1000;
	causes = count / 4 + 1;
	setup(line);
	for (u64 n = 0; n < causes; n++) {
		begun = ticks();
		trigger();
		cause += ticks() - begun;
		forget();
	}
	unmask();
	all = ticks();
	for (u64 n = 0; n < count; n++) {
		// Interrupts are on, as in a kernel at work: the one that this makes comes with the return from its exit.
		__asm__ volatile("sti" ::: "memory");
		begun = ticks();
		trigger();
		__asm__ volatile("cli" ::: "memory");
		// One that comes between the look and the halt is taken: `sti` lets one more instruction through.
		while (served <= n) __asm__ volatile("sti; hlt; cli" ::: "memory");
		injection += entered - begun;
		if (controller != VIOAPIC) in8(0x3fa);
	}
	all = ticks() - all;
	// Both averages are of noisy times on hardware: a cause may have come out dearer than cause and injection.
	injection = injection / count > cause / causes ? injection / count - cause / causes : 0;
	say("interrupts: controller=");
	say(controller == IOAPIC ? "ioapic" : controller == MESSAGE ? "message" : "vioapic");
	if (controller == VIOAPIC) field(" mode=", get(MODE) & 0xff);
	field(" count=", count);
	field(" served=", served);
	field(" spurious=", spurious);
	field(" rings=", rings);
	field(" eoi-skipped=", skipped);
	field(" ticks=", all / count);
	field(" causes=", causes);
	field(" cause=", cause / causes);
	field(" injection=", injection);
	field(" response=", response / count);
	say("\n");
	if (option(line, "marks")) {
		// For the lab: it reads KVM's counters now, and ends the machine.
		say("@@lab done\n");
		for (;;) __asm__ volatile("cli; hlt");
	}
	end(0x10);
}
