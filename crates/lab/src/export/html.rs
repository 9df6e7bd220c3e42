// SPDX-License-Identifier: Apache-2.0
//! The report as one HTML file without anything outside it: plots as inline SVG, light and dark by the reader's choice.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use super::plot::{Bar, Chart, Group, PARTS, subject_colour};
use super::{count, number, summary, tax};
use crate::price::KINDS;
use crate::report::{Report, Row};
use crate::scenario::stamps::PARTS as PARTS_OF_A_BOOT;

const STYLE: &str = include_str!("style.css");

/// Writes `index.html` into a directory, which is made when it is not there.
pub fn write(report: &Report, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("can't make {}", dir.display()))?;
    let path = dir.join("index.html");
    std::fs::write(&path, text(report)?).with_context(|| format!("can't write {}", path.display()))
}

/// The page.
pub fn text(report: &Report) -> Result<String> {
    let mut out = String::new();
    let names: Vec<String> = report.subjects.iter().map(|subject| escape(&subject.name)).collect();
    let title = format!("The tax of virtualization: {}", names.join(", "));
    write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
    )?;
    lead(report, &mut out)?;
    method(report, &mut out)?;
    taxes(report, &mut out)?;
    figures(report, &mut out)?;
    boots(report, &mut out)?;
    exits(report, &mut out)?;
    notes(report, &mut out)?;
    raw(report, &mut out)?;
    out += "</main>\n</body>\n</html>\n";
    Ok(out)
}

/// Text for HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn lead(report: &Report, out: &mut String) -> Result<()> {
    let method = &report.method;
    writeln!(
        out,
        "<p class=\"lead\">Suite <b>{}</b>, {} sample{} of each figure in mixed order, {} at a time; scale {}; {:.1} minutes.</p>",
        escape(&report.suite),
        method.repeat,
        if method.repeat == 1 { "" } else { "s" },
        method.jobs,
        method.scale,
        method.wall_seconds / 60.0
    )?;
    Ok(())
}

fn method(report: &Report, out: &mut String) -> Result<()> {
    let (method, host) = (&report.method, &report.host);
    writeln!(out, "<section class=\"box\"><h2>Method</h2><p>{}</p><dl>", escape(&method.statement))?;
    let mut item = |name: &str, text: &str| writeln!(out, "<dt>{name}</dt><dd>{}</dd>", escape(text));
    item("time", &method.time)?;
    if let Some(lab) = &host.lab {
        item("machine", lab)?;
    }
    item("host", &format!("{}, {} CPUs, {} MiB, Linux {}", host.cpu, host.cpus, host.memory_mib, host.kernel))?;
    if let Some(kernel) = &host.guest_kernel {
        item("guests", &format!("Linux {kernel}, unmodified"))?;
    }
    if !method.not_priced.is_empty() {
        item("not priced", &method.not_priced.join("; "))?;
    }
    out.push_str("</dl><details><summary>Subjects and their commands</summary><dl>");
    for subject in &report.subjects {
        let version = subject.version.as_ref().map(|version| format!(" ({})", escape(version))).unwrap_or_default();
        let template = if subject.template.is_empty() { "no monitor" } else { &subject.template };
        write!(out, "<dt>{}</dt><dd>{}{version}</dd>", escape(&subject.name), code(template))?;
    }
    out.push_str("</dl></details></section>\n");
    Ok(())
}

fn code(text: &str) -> String {
    format!("<code>{}</code>", escape(text))
}

/// Colours of all subjects, in table order.
fn colours(report: &Report) -> Vec<plotters::style::RGBColor> {
    report.subjects.iter().enumerate().map(|(i, subject)| subject_colour(&subject.name, i)).collect()
}

fn subject_names(report: &Report) -> Vec<&str> {
    report.subjects.iter().map(|subject| subject.name.as_str()).collect()
}

/// Bars for one figure of several workloads; `value` gives length and label by subject.
fn bars(report: &Report, rows: &[&Row], value: impl Fn(&Row, &str) -> Option<(f64, String)>) -> Vec<Group> {
    let group = |row: &&Row| Group {
        name: row.workload.clone(),
        bars: report
            .subjects
            .iter()
            .enumerate()
            .filter_map(|(series, subject)| {
                let (length, label) = value(row, &subject.name)?;
                Some(Bar { series, parts: vec![length], label })
            })
            .collect(),
    };
    rows.iter().map(group).filter(|group| !group.bars.is_empty()).collect()
}

fn chart(report: &Report, groups: Vec<Group>, unit: &str, own_scale: bool) -> Result<String> {
    let shown: Vec<usize> = groups.iter().flat_map(|group| group.bars.iter().map(|bar| bar.series)).collect();
    let keep: Vec<usize> = (0..report.subjects.len()).filter(|series| shown.contains(series)).collect();
    let (names, colours) = (subject_names(report), colours(report));
    let renumber = |group: Group| Group {
        bars: group
            .bars
            .into_iter()
            .map(|bar| Bar { series: keep.iter().position(|k| *k == bar.series).unwrap_or(0), ..bar })
            .collect(),
        ..group
    };
    Chart {
        legend: keep.iter().map(|i| names[*i]).collect(),
        colours: keep.iter().map(|i| colours[*i]).collect(),
        groups: groups.into_iter().map(renumber).collect(),
        stacked: None,
        own_scale,
        unit,
    }
    .svg()
}

fn taxes(report: &Report, out: &mut String) -> Result<()> {
    let rows: Vec<&Row> = report.workloads().iter().filter_map(|name| report.headline(name)).collect();
    let groups = bars(report, &rows, |row, subject| {
        let value = row.tax.get(subject)?;
        Some((value * 100.0, tax(row, subject)))
    });
    if groups.is_empty() {
        return Ok(());
    }
    out.push_str(
        "<section><h2>Tax against native</h2><p>What is lost: 1 &minus; rate/native, or time/native &minus; 1. \
         Shorter is better; left of zero is faster than native.</p>\n<figure>",
    );
    out.push_str(&chart(report, groups, " %", false)?);
    out.push_str("</figure></section>\n");
    Ok(())
}

fn figures(report: &Report, out: &mut String) -> Result<()> {
    let with_tax = report.results.iter().any(|row| !row.tax.is_empty());
    out.push_str("<section><h2>Figures</h2><p>Medians; &plusmn; is half the range of the samples.</p><div class=\"wide\"><table>\n");
    out.push_str("<thead><tr><th>workload</th><th>figure</th><th>unit</th>");
    for subject in &report.subjects {
        write!(out, "<th class=\"n\">{}</th>", escape(&subject.name))?;
        if with_tax && !subject.template.is_empty() {
            out.push_str("<th class=\"n\">tax</th>");
        }
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    let mut last = "";
    for row in summary(report) {
        let first = row.workload != last;
        last = &row.workload;
        write!(
            out,
            "<tr{}><td>{}</td><td>{}</td><td>{}</td>",
            if first { " class=\"first\"" } else { "" },
            if first { escape(&row.workload) } else { String::new() },
            escape(&row.metric),
            escape(&row.unit)
        )?;
        for subject in &report.subjects {
            match (row.median.get(&subject.name), row.spread.get(&subject.name)) {
                (Some(median), Some(spread)) if spread.n == 1 => {
                    write!(out, "<td class=\"n\">{}</td>", number(*median))?;
                }
                (Some(median), Some(spread)) => write!(
                    out,
                    "<td class=\"n\">{} <small>&plusmn;&thinsp;{:.1}&thinsp;%</small></td>",
                    number(*median),
                    spread.relative(*median) * 100.0
                )?,
                _ => out.push_str("<td class=\"n\">&ndash;</td>"),
            }
            if with_tax && !subject.template.is_empty() {
                let text = tax(row, &subject.name);
                write!(
                    out,
                    "<td class=\"n{}\">{}</td>",
                    if first { " tax" } else { "" },
                    if text == "-" { "" } else { &text }
                )?;
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div></section>\n");
    Ok(())
}

fn boots(report: &Report, out: &mut String) -> Result<()> {
    let rows = |metric: &str| -> Vec<&Row> {
        report.results.iter().filter(|row| row.workload.starts_with("boot") && row.metric == metric).collect()
    };
    let mut plots = String::new();
    for (metric, unit, caption) in [
        ("time to user space", " s", "From the start of the monitor to the first line of user space."),
        ("RSS beside guest memory", " MiB", "Resident memory of the monitor, the guest's own memory left out."),
    ] {
        let groups = bars(report, &rows(metric), |row, subject| {
            let value = row.median.get(subject)?;
            Some((*value, format!("{}{unit}", number(*value))))
        });
        if !groups.is_empty() {
            writeln!(plots, "<p>{caption}</p>\n<figure>{}</figure>", chart(report, groups, unit, false)?)?;
        }
    }
    plots += &timelines(report)?;
    if !plots.is_empty() {
        writeln!(
            out,
            "<section><h2>Boot</h2><p>A stock kernel with an initrd of one small program. <b>boot</b>: serial console with all kernel \
             messages, the same for every monitor. \
             <b>boot quiet</b>: <code>quiet</code>, each monitor on its own default console. <b>boot untested</b>: the same, without \
             the tests that the kernel makes of its cryptography (<code>cryptomgr.notests</code>).</p>{plots}</section>"
        )?;
    }
    Ok(())
}

/// The boot as a timeline, a bar for each subject.
fn timelines(report: &Report) -> Result<String> {
    let rows: Vec<&Row> = PARTS_OF_A_BOOT
        .iter()
        .filter_map(|part| {
            let metric = format!("of it {part}");
            report.results.iter().find(|row| row.workload == "boot" && row.metric == metric)
        })
        .collect();
    if rows.len() != PARTS_OF_A_BOOT.len() {
        return Ok(String::new());
    }
    let who: Vec<&str> = subject_names(report)
        .into_iter()
        .filter(|name| rows.iter().all(|row| row.median.contains_key(*name)))
        .collect();
    let bar = |(series, name): (usize, &&str)| {
        let parts: Vec<f64> = rows.iter().filter_map(|row| row.median.get(*name).copied()).collect();
        let label = format!("{} s", number(parts.iter().sum()));
        Bar { series, parts, label }
    };
    let chart = Chart {
        legend: PARTS_OF_A_BOOT.to_vec(),
        colours: PARTS[..rows.len()].to_vec(),
        groups: vec![Group { name: "boot".to_owned(), bars: who.iter().enumerate().map(bar).collect() }],
        stacked: Some(who),
        own_scale: false,
        unit: " s",
    };
    Ok(format!("<p>The boot as a timeline, by the guest kernel's own clock.</p>\n<figure>{}</figure>", chart.svg()?))
}

fn exits(report: &Report, out: &mut String) -> Result<()> {
    let mut groups = Vec::new();
    let who: Vec<&str> = subject_names(report).into_iter().filter(|name| report.exits.contains_key(*name)).collect();
    for workload in report.workloads() {
        let bars: Vec<Bar> = who
            .iter()
            .enumerate()
            .filter_map(|(series, name)| {
                let exits = report.exits.get(*name)?.get(workload)?;
                let parts =
                    KINDS.iter().map(|kind| exits.by_kind.get(kind.name).copied().unwrap_or(0) as f64).collect();
                let label = format!("{}  ({} ms)", count(exits.total), number(exits.priced_ms));
                Some(Bar { series, parts, label })
            })
            .collect();
        if !bars.is_empty() {
            groups.push(Group { name: workload.to_owned(), bars });
        }
    }
    if groups.is_empty() {
        return Ok(());
    }
    let used: Vec<usize> = (0..KINDS.len())
        .filter(|kind| groups.iter().flat_map(|group| &group.bars).any(|bar| bar.parts[*kind] > 0.0))
        .collect();
    for bar in groups.iter_mut().flat_map(|group| &mut group.bars) {
        bar.parts = used.iter().map(|kind| bar.parts[*kind]).collect();
    }
    let chart = Chart {
        legend: used.iter().map(|kind| KINDS[*kind].name).collect(),
        colours: used.iter().map(|kind| PARTS[*kind % PARTS.len()]).collect(),
        groups,
        stacked: Some(who),
        own_scale: true,
        unit: "",
    };
    write!(
        out,
        "<section><h2>Exits</h2><p>VM exits by kind, as KVM counts them. Within a workload the longest bar takes the whole \
         width; in brackets what the exits would cost on hardware by the constants below.</p>\n<figure>{}</figure>\n\
         <details><summary>What an exit is assumed to cost</summary><table><thead><tr><th>kind</th>\
         <th class=\"n\">ns</th><th>why</th></tr></thead><tbody>\n",
        chart.svg()?
    )?;
    for kind in KINDS {
        writeln!(out, "<tr><td>{}</td><td class=\"n\">{}</td><td>{}</td></tr>", kind.name, kind.ns, escape(kind.why))?;
    }
    out.push_str("</tbody></table></details></section>\n");
    Ok(())
}

fn notes(report: &Report, out: &mut String) -> Result<()> {
    out.push_str("<section><h2>Notes</h2><ul>\n");
    for note in &report.notes {
        writeln!(out, "<li>{}</li>", escape(note))?;
    }
    for item in &report.method.not_priced {
        writeln!(out, "<li>Not priced: {}.</li>", escape(item))?;
    }
    out.push_str("</ul></section>\n");
    Ok(())
}

fn raw(report: &Report, out: &mut String) -> Result<()> {
    out.push_str("<section><details><summary>All figures and raw samples</summary><div class=\"wide\"><table>\n");
    out.push_str("<thead><tr><th>workload</th><th>figure</th><th>unit</th><th>subject</th><th>samples</th></tr></thead><tbody>\n");
    for row in &report.results {
        for subject in &report.subjects {
            let Some(samples) = row.samples.get(&subject.name) else { continue };
            let list: Vec<String> = samples.iter().map(|value| number(*value)).collect();
            writeln!(
                out,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                escape(&row.workload),
                escape(&row.metric),
                escape(&row.unit),
                escape(&subject.name),
                list.join(" &nbsp; ")
            )?;
        }
    }
    out.push_str("</tbody></table></div></details></section>\n");
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::assemble::tests::made_up;

    #[test]
    fn the_page_is_self_contained_and_has_all_parts() {
        let page = text(&made_up()).unwrap();
        for outside in ["src=", "href=", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<svg").count(), 3, "tax, boot time, exits (the made-up report has no memory figures)");
        for part in ["Method", "Tax against native", "Figures", "Boot", "Exits", "Notes", "All figures and raw samples"]
        {
            assert!(page.contains(part), "{part}");
        }
        assert!(page.contains("Some CPU &lt;5&gt;"), "text from outside is escaped");
        assert!(page.contains("prefers-color-scheme"));
        assert_eq!(page.matches("<section").count(), page.matches("</section>").count());
        assert_eq!(page.matches("<details").count(), page.matches("</details>").count());
    }

    #[test]
    fn a_run_without_native_has_no_tax_columns() {
        let mut report = made_up();
        for row in &mut report.results {
            row.tax.clear();
        }
        let page = text(&report).unwrap();
        assert!(!page.contains("Tax against native") && !page.contains(">tax<"));
    }
}
