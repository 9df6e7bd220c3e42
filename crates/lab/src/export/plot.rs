// SPDX-License-Identifier: Apache-2.0
//! The report's plots, as SVG text for the HTML page: grouped bars and stacked bars, all horizontal.
//!
//! Drawn with plotters' SVG backend in plain pixel coordinates. Colours of text and lines are left to the page's style
//! sheet, so that one picture serves light and dark.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const WIDTH: u32 = 920;
const LABELS: i32 = 190;
const RIGHT: i32 = 140;
const BAR: i32 = 17;
const GAP: i32 = 3;
const GROUP_GAP: i32 = 16;
const TOP: i32 = 34;

/// The page's style sheet recolours these two.
const TEXT: RGBColor = RGBColor(0x20, 0x20, 0x20);
const LINE: RGBColor = RGBColor(0xc8, 0xc8, 0xc8);

/// One bar.
pub struct Bar {
    /// Name at its left, when the group has more than one series.
    pub series: usize,
    /// Length of each part, in the axis' unit; a plain bar has one part. May be negative.
    pub parts: Vec<f64>,
    /// Text at its end.
    pub label: String,
}

/// Bars that belong together.
pub struct Group {
    /// Text at the left.
    pub name: String,
    /// From top to bottom.
    pub bars: Vec<Bar>,
}

/// A chart.
pub struct Chart<'a> {
    /// Names of the series (bars) or of the parts, for the legend.
    pub legend: Vec<&'a str>,
    /// Their colours.
    pub colours: Vec<RGBColor>,
    /// The groups from top to bottom.
    pub groups: Vec<Group>,
    /// Colours go by part instead of by series; series names are then written before the bars.
    pub stacked: Option<Vec<&'a str>>,
    /// Each group has its own scale, its longest bar taking the whole width; no axis is drawn then.
    pub own_scale: bool,
    /// Unit on the axis.
    pub unit: &'a str,
}

/// Colour of a subject: fixed for the usual ones, from a palette for the rest.
pub fn subject_colour(name: &str, index: usize) -> RGBColor {
    const OTHERS: [RGBColor; 5] = [
        RGBColor(0x8e, 0x6c, 0xc8),
        RGBColor(0xc0, 0x5a, 0x8a),
        RGBColor(0x5b, 0x84, 0xd6),
        RGBColor(0xa8, 0x8b, 0x2f),
        RGBColor(0x6b, 0x9a, 0x4b),
    ];
    match name {
        "native" => RGBColor(0x8a, 0x8f, 0x98),
        "tare" => RGBColor(0x12, 0x9b, 0x8b),
        "qemu" => RGBColor(0xe0, 0x7b, 0x39),
        _ => OTHERS[index % OTHERS.len()],
    }
}

/// Colours of the parts of a stack.
pub const PARTS: [RGBColor; 9] = [
    RGBColor(0xd6, 0x4d, 0x4d),
    RGBColor(0xe8, 0x94, 0x3a),
    RGBColor(0xd9, 0xc0, 0x3c),
    RGBColor(0xa3, 0xc4, 0x6a),
    RGBColor(0x5f, 0xa8, 0x57),
    RGBColor(0x3b, 0x9f, 0xb0),
    RGBColor(0x4d, 0x79, 0xcf),
    RGBColor(0x8a, 0x63, 0xc4),
    RGBColor(0x9a, 0x9a, 0x9a),
];

impl Chart<'_> {
    /// The picture as SVG text.
    pub fn svg(&self) -> Result<String> {
        let rows: usize = self.groups.iter().map(|group| group.bars.len()).sum();
        let body = rows as i32 * (BAR + GAP) + self.groups.len() as i32 * GROUP_GAP;
        let axis = if self.own_scale { 4 } else { 30 };
        let mut text = String::new();
        {
            let height = (TOP + body + axis) as u32;
            let root = SVGBackend::with_string(&mut text, (WIDTH, height)).into_drawing_area();
            let pen = Pen { area: &root };
            self.draw(&pen, body)?;
            root.present().map_err(|error| anyhow!("drawing a plot: {error}"))?;
        }
        Ok(text)
    }

    fn draw(&self, pen: &Pen, body: i32) -> Result<()> {
        let mut x = LABELS;
        for (name, colour) in self.legend.iter().zip(&self.colours) {
            pen.rect(x, 6, x + 12, 18, *colour)?;
            pen.text(name, x + 17, 12, 14, HPos::Left)?;
            x += 17 + 9 * name.len() as i32 + 16;
        }
        let all = self.extent(self.groups.iter());
        if !self.own_scale {
            self.axis(pen, &all, body)?;
        }
        let mut y = TOP + GROUP_GAP / 2;
        for group in &self.groups {
            let scale = if self.own_scale { self.extent(std::iter::once(group)) } else { all };
            let height = group.bars.len() as i32 * (BAR + GAP);
            let name_at = if self.stacked.is_some() { 8 } else { LABELS - 12 };
            let side = if self.stacked.is_some() { HPos::Left } else { HPos::Right };
            pen.text(&group.name, name_at, y + height / 2 - GAP / 2, 15, side)?;
            for bar in &group.bars {
                self.bar(pen, bar, &scale, y)?;
                y += BAR + GAP;
            }
            y += GROUP_GAP;
        }
        Ok(())
    }

    fn bar(&self, pen: &Pen, bar: &Bar, scale: &Scale, y: i32) -> Result<()> {
        if let Some(names) = &self.stacked {
            pen.text(names.get(bar.series).copied().unwrap_or(""), LABELS - 8, y + BAR / 2, 13, HPos::Right)?;
        }
        let mut from = 0.0;
        for (part, length) in bar.parts.iter().enumerate() {
            let colour = if self.stacked.is_some() { part } else { bar.series };
            let colour = self.colours.get(colour).copied().unwrap_or(TEXT);
            let (a, b) = (scale.x(from), scale.x(from + length));
            let (a, b) = (a.min(b), a.max(b));
            if b > a || self.stacked.is_none() {
                pen.rect(a, y, b.max(a + 1), y + BAR, colour)?;
            }
            from += length;
        }
        pen.text(&bar.label, scale.x(from).max(scale.x(0.0)) + 6, y + BAR / 2, 13, HPos::Left)
    }

    fn axis(&self, pen: &Pen, scale: &Scale, body: i32) -> Result<()> {
        let step = tick(scale.max - scale.min);
        let first = (scale.min / step).ceil() as i64;
        let last = (scale.max / step).floor() as i64;
        for at in first..=last {
            let value = at as f64 * step;
            let x = scale.x(value);
            pen.line(x, TOP, TOP + body, if at == 0 { 2 } else { 1 })?;
            let decimals = if step < 0.1 { 2 } else { usize::from(step < 1.0) };
            pen.text(&format!("{value:.decimals$}{}", self.unit), x, TOP + body + 12, 13, HPos::Center)?;
        }
        Ok(())
    }

    fn extent<'g>(&self, groups: impl Iterator<Item = &'g Group>) -> Scale {
        let mut scale = Scale { min: 0.0, max: 0.0 };
        for bar in groups.flat_map(|group| &group.bars) {
            let total: f64 = bar.parts.iter().sum();
            scale.min = scale.min.min(total);
            scale.max = scale.max.max(total);
        }
        if scale.max - scale.min <= 0.0 {
            scale.max = scale.min + 1.0;
        }
        scale
    }
}

#[derive(Clone, Copy)]
struct Scale {
    min: f64,
    max: f64,
}

impl Scale {
    fn x(&self, value: f64) -> i32 {
        let width = f64::from(WIDTH as i32 - LABELS - RIGHT);
        LABELS + ((value - self.min) / (self.max - self.min) * width).round() as i32
    }
}

/// A round step that gives four to ten ticks.
fn tick(span: f64) -> f64 {
    let rough = span / 8.0;
    let power = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 5.0, 10.0].iter().map(|factor| factor * power).find(|step| *step >= rough).unwrap_or(10.0 * power)
}

struct Pen<'a, 'b> {
    area: &'a DrawingArea<SVGBackend<'b>, plotters::coord::Shift>,
}

impl Pen<'_, '_> {
    fn rect(&self, x0: i32, y0: i32, x1: i32, y1: i32, colour: RGBColor) -> Result<()> {
        let shape = Rectangle::new([(x0, y0), (x1, y1)], colour.filled());
        self.area.draw(&shape).map_err(|error| anyhow!("drawing a plot: {error}"))
    }

    fn line(&self, x: i32, y0: i32, y1: i32, width: u32) -> Result<()> {
        let shape = PathElement::new(vec![(x, y0), (x, y1)], LINE.stroke_width(width));
        self.area.draw(&shape).map_err(|error| anyhow!("drawing a plot: {error}"))
    }

    fn text(&self, text: &str, x: i32, y: i32, size: u32, side: HPos) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let style = TextStyle::from(("sans-serif", size).into_font()).color(&TEXT).pos(Pos::new(side, VPos::Center));
        self.area.draw(&Text::new(text.to_owned(), (x, y), style)).map_err(|error| anyhow!("drawing a plot: {error}"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn chart(values: &[f64]) -> String {
        let bars = values.iter().map(|v| Bar { series: 0, parts: vec![*v], label: format!("{v} %") }).collect();
        Chart {
            legend: vec!["tare"],
            colours: vec![subject_colour("tare", 0)],
            groups: vec![Group { name: "a < b".into(), bars }],
            stacked: None,
            own_scale: false,
            unit: " %",
        }
        .svg()
        .unwrap()
    }

    #[test]
    fn bars_carry_their_labels_and_text_is_escaped() {
        let svg = chart(&[12.5, -3.0]);
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("12.5 %") && svg.contains("-3 %"));
        assert!(svg.contains("a &lt; b"), "names are escaped");
        assert_eq!(svg.matches("<rect").count(), 3, "two bars and the legend's box");
    }

    #[test]
    fn nothing_to_draw_is_still_a_picture() {
        assert!(chart(&[]).contains("</svg>"));
        assert!(chart(&[0.0, 0.0]).contains("</svg>"));
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(tick(100.0), 20.0);
        assert_eq!(tick(8.0), 1.0);
        assert!((tick(0.35) - 0.05).abs() < 1e-12);
    }
}
