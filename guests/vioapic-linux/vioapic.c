// SPDX-License-Identifier: GPL-2.0
/*
 * Linux driver of tare's paravirtual I/O interrupt controller (docs/vioapic.md says what it may assume).
 *
 * Each of the 64 lines is an interrupt of a domain below the CPUs' vectors, as a pin of an I/O APIC or an MSI is: it has a
 * vector of its own, and moves, goes down with its CPU and comes back by the kernel's ordinary ways. The virtio-mmio devices
 * that the controller announces become platform devices, for the kernel's own driver.
 *
 * A kernel module, and therefore under the kernel's licence; everything else in this project has another one.
 */
#define pr_fmt(fmt) "vioapic: " fmt

#include <linux/acpi.h>
#include <linux/dma-mapping.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/irq.h>
#include <linux/irqdomain.h>
#include <linux/module.h>
#include <linux/platform_device.h>
#include <linux/smp.h>
#include <asm/apic.h>
#include <asm/hw_irq.h>
#include <asm/irqdomain.h>

#define LINES		64
#define PAGES		3
#define MAGIC		0x31636970616f6976ULL	/* "vioapic1" */
#define DEVICE_SIZE	0x1000

enum { R_MAGIC = 0x00, R_MODE = 0x08, R_IRR = 0x10, R_ISR = 0x18, R_MASK = 0x20, R_UNMASK = 0x28, R_ACK = 0x30,
       R_LEVEL = 0x40, R_EVENT = 0x48, R_RESET = 0x50, R_LINE = 0x100, R_DEVICE = 0x300 };
enum mode { TRAP, RO_PAGE, PV };

/* The guest's words, page 1 (mode pv). */
struct words {
	atomic64_t mask;
	atomic64_t unmask;
	atomic64_t ack;
};

struct vioapic {
	void __iomem *io;		/* all pages, every access leaves */
	const volatile u64 *shown;	/* page 0 as memory; NULL in mode trap */
	struct words *words;		/* page 1; NULL but in mode pv */
	struct fwnode_handle *fwnode;
	struct irq_domain *domain;
	struct platform_device *devices[LINES];
	unsigned int irqs[LINES];
};

static char *flow = "fasteoi";
module_param(flow, charp, 0444);
MODULE_PARM_DESC(flow, "fasteoi: one access for an interrupt; level: mask, acknowledge, unmask, eight accesses");

static u64 bit_of(struct irq_data *data)
{
	return BIT_ULL(data->hwirq);
}

static u64 get(struct vioapic *v, u32 offset)
{
	return v->shown ? v->shown[offset / 8] : readq(v->io + offset);
}

static void set(struct vioapic *v, u32 offset, u64 value)
{
	writeq(value, v->io + offset);
}

/* Lines that want service. In mode pv page 0 shows what the monitor last knew: the words say the rest. */
static u64 requested(struct vioapic *v)
{
	if (!v->words)
		return get(v, R_IRR);
	return get(v, R_LEVEL) | (get(v, R_EVENT) ^ atomic64_read(&v->words->ack));
}

static u64 masked(struct vioapic *v)
{
	return v->words ? atomic64_read(&v->words->mask) : get(v, R_MASK);
}

static void mask_line(struct vioapic *v, u64 line)
{
	/* An unmasking that the monitor has not taken over would come after a masking by the word alone. */
	if (v->words && !(atomic64_read(&v->words->unmask) & line))
		atomic64_or(line, &v->words->mask);
	else
		set(v, R_MASK, line);
}

static void ack_line(struct vioapic *v, u64 line)
{
	if (!v->words)
		set(v, R_ACK, line);
	else if ((get(v, R_EVENT) ^ atomic64_read(&v->words->ack)) & line)
		atomic64_xor(line, &v->words->ack);
}

/* Unmasks the line and ends its service. */
static void unmask_line(struct vioapic *v, u64 line)
{
	if (!v->words) {
		set(v, R_UNMASK, line);
		return;
	}
	/* Set, then looked: the monitor shows, then looks. One sees the other; the locked instruction is the barrier. */
	atomic64_or(line, &v->words->unmask);
	smp_mb__after_atomic();
	if (requested(v) & line)
		writel(1, v->io + 2 * PAGE_SIZE);
}

static void vioapic_mask(struct irq_data *data)
{
	mask_line(irq_data_get_irq_chip_data(data), bit_of(data));
}

static void vioapic_unmask(struct irq_data *data)
{
	unmask_line(irq_data_get_irq_chip_data(data), bit_of(data));
}

/* A line that was masked meanwhile stays in service: its unmasking ends that. */
static void vioapic_eoi(struct irq_data *data)
{
	struct vioapic *v = irq_data_get_irq_chip_data(data);
	/* A move that had to wait for this interrupt: the kernel masks and unmasks the line around it, in ack. */
	bool unmasked = irqd_is_setaffinity_pending(data) && !irqd_irq_disabled(data);

	irq_chip_ack_parent(data);
	if (irqd_irq_masked(data) || unmasked)
		return;
	if (v->words)
		ack_line(v, bit_of(data));
	unmask_line(v, bit_of(data));
}

/* The study's way: what wants service, is it masked, mask it. */
static void vioapic_mask_level(struct irq_data *data)
{
	struct vioapic *v = irq_data_get_irq_chip_data(data);
	u64 line = bit_of(data);

	if (!(requested(v) & ~masked(v) & line))
		pr_debug("line %lu: spurious\n", data->hwirq);
	mask_line(v, line);
}

/* Acknowledge it. Not one with masking: a move that waited for this interrupt has to find the line marked as masked. */
static void vioapic_ack_level(struct irq_data *data)
{
	ack_line(irq_data_get_irq_chip_data(data), bit_of(data));
	irq_chip_ack_parent(data);
}

/* Its end: is there more, is it masked still, unmask it, did that take. */
static void vioapic_unmask_level(struct irq_data *data)
{
	struct vioapic *v = irq_data_get_irq_chip_data(data);

	requested(v);
	masked(v);
	unmask_line(v, bit_of(data));
	if (!v->words)
		get(v, R_ISR);
}

/* Tells the controller where the line goes: one store, so that no message goes to a mixture of old and new. */
static void route(struct irq_data *data)
{
	const struct cpumask *effective = irq_data_get_effective_affinity_mask(data);
	u64 cpu = cpumask_first(effective);

	set(irq_data_get_irq_chip_data(data), R_LINE + 8 * data->hwirq,
	    irqd_cfg(data)->vector | (u64)per_cpu(x86_cpu_to_apicid, cpu) << 32);
}

static int vioapic_set_affinity(struct irq_data *data, const struct cpumask *mask, bool force)
{
	struct irq_data *parent = data->parent_data;
	int ret = parent->chip->irq_set_affinity(parent, mask, force);

	if (ret >= 0 && ret != IRQ_SET_MASK_OK_DONE)
		route(data);
	return ret;
}

static int vioapic_set_type(struct irq_data *data, unsigned int type)
{
	return type == IRQ_TYPE_LEVEL_HIGH ? IRQ_SET_MASK_OK : -EINVAL;
}

static struct irq_chip vioapic_fasteoi = {
	.name = "vioapic",
	.irq_mask = vioapic_mask,
	.irq_unmask = vioapic_unmask,
	.irq_eoi = vioapic_eoi,
	.irq_ack = irq_chip_ack_parent,
	.irq_set_affinity = vioapic_set_affinity,
	.irq_set_type = vioapic_set_type,
	.irq_retrigger = irq_chip_retrigger_hierarchy,
	.flags = IRQCHIP_SKIP_SET_WAKE | IRQCHIP_AFFINITY_PRE_STARTUP,
};

static struct irq_chip vioapic_level = {
	.name = "vioapic",
	.irq_mask = vioapic_mask_level,
	.irq_unmask = vioapic_unmask_level,
	.irq_ack = vioapic_ack_level,
	.irq_set_affinity = vioapic_set_affinity,
	.irq_set_type = vioapic_set_type,
	.irq_retrigger = irq_chip_retrigger_hierarchy,
	.flags = IRQCHIP_SKIP_SET_WAKE | IRQCHIP_AFFINITY_PRE_STARTUP,
};

static int vioapic_alloc(struct irq_domain *domain, unsigned int virq, unsigned int count, void *arg)
{
	struct irq_alloc_info *info = arg;
	bool level = !strcmp(flow, "level");
	int ret;

	if (count != 1 || info->hwirq >= LINES)
		return -EINVAL;
	ret = irq_domain_alloc_irqs_parent(domain, virq, 1, info);
	if (ret)
		return ret;
	irq_domain_set_info(domain, virq, info->hwirq, level ? &vioapic_level : &vioapic_fasteoi, domain->host_data,
			    level ? handle_level_irq : handle_fasteoi_irq, NULL, NULL);
	/* LINE changes with one store, at any moment: no need to wait for an interrupt to move it. */
	irq_set_status_flags(virq, IRQ_LEVEL | IRQ_MOVE_PCNTXT);
	return 0;
}

static int vioapic_activate(struct irq_domain *domain, struct irq_data *data, bool reserve)
{
	route(data);
	return 0;
}

static void vioapic_deactivate(struct irq_domain *domain, struct irq_data *data)
{
	set(domain->host_data, R_MASK, bit_of(data));
	set(domain->host_data, R_LINE + 8 * data->hwirq, 0);
}

static const struct irq_domain_ops vioapic_domain = {
	.alloc = vioapic_alloc,
	.free = irq_domain_free_irqs_common,
	.activate = vioapic_activate,
	.deactivate = vioapic_deactivate,
};

/* The device that the controller says is behind `line`, if there is one. */
static int add_device(struct device *parent, struct vioapic *v, unsigned int line)
{
	u64 at = get(v, R_DEVICE + 8 * line);
	struct irq_alloc_info info = { .hwirq = line };
	struct platform_device *device;
	int irq;

	if (!at)
		return 0;
	irq = irq_domain_alloc_irqs(v->domain, 1, NUMA_NO_NODE, &info);
	if (irq < 0)
		return irq;
	v->irqs[line] = irq;
	device = platform_device_register_full(&(struct platform_device_info) {
		.parent = parent,
		.name = "virtio-mmio",
		.id = PLATFORM_DEVID_AUTO,
		.res = (struct resource[]) {
			DEFINE_RES_MEM(at, DEVICE_SIZE),
			DEFINE_RES_NAMED(irq, 1, NULL, IORESOURCE_IRQ | IORESOURCE_IRQ_HIGHLEVEL),
		},
		.num_res = 2,
		.dma_mask = DMA_BIT_MASK(64),
	});
	if (IS_ERR(device))
		return PTR_ERR(device);
	v->devices[line] = device;
	return 0;
}

/* Also half-way: what was not made is NULL. */
static int vioapic_remove(struct platform_device *pdev)
{
	struct vioapic *v = platform_get_drvdata(pdev);
	unsigned int line;

	for (line = 0; line < LINES; line++) {
		platform_device_unregister(v->devices[line]);
		if (v->irqs[line])
			irq_dispose_mapping(v->irqs[line]);
	}
	if (v->domain)
		irq_domain_remove(v->domain);
	irq_domain_free_fwnode(v->fwnode);
	set(v, R_RESET, 1);
	return 0;
}

static int map(struct platform_device *pdev, struct vioapic *v)
{
	struct device *dev = &pdev->dev;
	struct resource *res = platform_get_resource(pdev, IORESOURCE_MEM, 0);
	u64 mode;

	if (!res || resource_size(res) < PAGES * PAGE_SIZE)
		return dev_err_probe(dev, -ENODEV, "no pages\n");
	v->io = devm_ioremap(dev, res->start, PAGES * PAGE_SIZE);
	if (!v->io)
		return -ENOMEM;
	if (readq(v->io + R_MAGIC) != MAGIC)
		return dev_err_probe(dev, -ENODEV, "not a vioapic1\n");
	mode = readq(v->io + R_MODE);
	if (mode >> 32 != LINES || (u32)mode > PV)
		return dev_err_probe(dev, -ENODEV, "mode %#llx is not known to this driver\n", mode);
	if ((u32)mode != TRAP) {
		void *pages = devm_memremap(dev, res->start, ((u32)mode == PV ? 2 : 1) * PAGE_SIZE, MEMREMAP_WB);

		if (IS_ERR(pages))
			return PTR_ERR(pages);
		v->shown = pages;
		if ((u32)mode == PV)
			v->words = pages + PAGE_SIZE;
	}
	dev_info(dev, "mode %s, flow %s\n", (const char *[]) { "trap", "ro-page", "pv" }[(u32)mode], flow);
	return 0;
}

static int vioapic_probe(struct platform_device *pdev)
{
	struct device *dev = &pdev->dev;
	struct vioapic *v;
	unsigned int line;
	int cpu, ret;

	if (strcmp(flow, "fasteoi") && strcmp(flow, "level"))
		return dev_err_probe(dev, -EINVAL, "flow=%s: it is fasteoi or level\n", flow);
	for_each_possible_cpu(cpu) {
		if (per_cpu(x86_cpu_to_apicid, cpu) > 0xff && per_cpu(x86_cpu_to_apicid, cpu) != BAD_APICID)
			return dev_err_probe(dev, -EOPNOTSUPP, "CPU %d: APIC ids above 255 can't be reached\n", cpu);
	}
	v = devm_kzalloc(dev, sizeof(*v), GFP_KERNEL);
	if (!v)
		return -ENOMEM;
	ret = map(pdev, v);
	if (ret)
		return ret;
	platform_set_drvdata(pdev, v);
	/* Whoever used it before us (a kernel that kexec ended) may have left anything. */
	set(v, R_RESET, 1);
	v->fwnode = irq_domain_alloc_named_fwnode("vioapic");
	if (!v->fwnode)
		return -ENOMEM;
	v->domain = irq_domain_create_hierarchy(x86_vector_domain, 0, LINES, v->fwnode, &vioapic_domain, v);
	ret = v->domain ? 0 : -ENOMEM;
	for (line = 0; !ret && line < LINES; line++)
		ret = add_device(dev, v, line);
	if (ret)
		vioapic_remove(pdev);
	return ret;
}

/* After a sleep in which the controller lost its state (hibernation: another machine) it gets what the kernel knows. */
static int vioapic_resume(struct device *dev)
{
	struct vioapic *v = dev_get_drvdata(dev);
	unsigned int line;

	for (line = 0; line < LINES; line++) {
		struct irq_data *data = v->irqs[line] ? irq_get_irq_data(v->irqs[line]) : NULL;

		if (!data || !irqd_is_activated(data) || get(v, R_LINE + 8 * line))
			continue;
		route(data);
		if (!irqd_irq_masked(data))
			unmask_line(v, bit_of(data));
	}
	return 0;
}

static const struct dev_pm_ops vioapic_pm = {
	.resume_noirq = vioapic_resume,
	.thaw_noirq = vioapic_resume,
	.restore_noirq = vioapic_resume,
};

static const struct acpi_device_id vioapic_ids[] = { { "TARE0001" }, { } };
MODULE_DEVICE_TABLE(acpi, vioapic_ids);

static struct platform_driver vioapic_driver = {
	.probe = vioapic_probe,
	.remove = vioapic_remove,
	.driver = { .name = "vioapic", .acpi_match_table = vioapic_ids, .pm = &vioapic_pm },
};
module_platform_driver(vioapic_driver);

MODULE_SOFTDEP("post: virtio_mmio");
MODULE_DESCRIPTION("tare's paravirtual I/O interrupt controller");
MODULE_LICENSE("GPL");
