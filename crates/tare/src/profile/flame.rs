// SPDX-License-Identifier: Apache-2.0
//! A flame graph: a tree of times, drawn as SVG with the root below and what was called above its caller. Written out by
//! hand, since it is some rectangles and the crate that draws them has a licence that this project does not take.

use std::fmt::Write as _;

/// What a frame is, for its colour and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A phase of tare's own, a thread, or the root: stay in their order.
    Own,
    /// A function of this process.
    User,
    /// A function of the host's kernel.
    Kernel,
}

/// A frame and what is above it.
#[derive(Debug)]
pub struct Frame {
    name: String,
    kind: Kind,
    /// Nanoseconds, those of the frames above included.
    ns: u64,
    above: Vec<Frame>,
}

/// Pixels.
const WIDTH: f64 = 1200.0;
const MARGIN: f64 = 10.0;
const ROW: f64 = 16.0;
const HEAD: f64 = 40.0;
/// What is narrower is left out.
const LEAST: f64 = 0.2;
/// A character of the text.
const LETTER: f64 = 6.6;

impl Frame {
    /// One without time.
    #[must_use]
    pub fn new(name: &str, kind: Kind) -> Self {
        Self { name: name.to_owned(), kind, ns: 0, above: Vec::new() }
    }

    /// Adds `ns` to it and to each frame of `path`, one above the other.
    pub fn add<'a>(&mut self, path: impl IntoIterator<Item = (&'a str, Kind)>, ns: u64) {
        self.ns += ns;
        let mut at = self;
        for (name, kind) in path {
            let known = at.above.iter().position(|frame| frame.name == name && frame.kind == kind);
            let index = known.unwrap_or_else(|| {
                at.above.push(Self::new(name, kind));
                at.above.len() - 1
            });
            // It was found or pushed just now.
            let Some(next) = at.above.get_mut(index) else { return };
            next.ns += ns;
            at = next;
        }
    }

    /// Functions in the order of their names, so that two graphs can be told apart; what is tare's own stays.
    fn sort(&mut self) {
        self.above.sort_by(|a, b| match (a.kind, b.kind) {
            (Kind::Own, Kind::Own) => std::cmp::Ordering::Equal,
            (Kind::Own, _) => std::cmp::Ordering::Less,
            (_, Kind::Own) => std::cmp::Ordering::Greater,
            _ => a.name.cmp(&b.name),
        });
        self.above.iter_mut().for_each(Self::sort);
    }

    fn depth(&self) -> usize {
        1 + self.above.iter().map(Self::depth).max().unwrap_or(0)
    }

    /// The graph.
    #[must_use]
    pub fn svg(mut self, title: &str) -> String {
        self.sort();
        let rows = self.depth();
        let height = HEAD + rows as f64 * ROW + MARGIN;
        let mut out = format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"monospace\" font-size=\"11\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fcfcfa\"/>\n\
             <text x=\"{:.1}\" y=\"24\" text-anchor=\"middle\" font-size=\"15\">{}</text>\n",
            WIDTH / 2.0,
            escaped(title)
        );
        let scale = (WIDTH - 2.0 * MARGIN) / self.ns.max(1) as f64;
        let all = self.ns;
        self.draw(&mut out, (MARGIN, height - MARGIN - ROW), scale, all);
        out.push_str("</svg>\n");
        out
    }

    fn draw(&self, out: &mut String, (x, y): (f64, f64), scale: f64, all: u64) {
        let width = self.ns as f64 * scale;
        if width < LEAST {
            return;
        }
        let share = self.ns as f64 / all.max(1) as f64 * 100.0;
        // Writing to a string can't fail.
        let _ = writeln!(
            out,
            "<g><title>{name} ({ms:.3} ms, {share:.2} %)</title><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" \
             height=\"{:.1}\" fill=\"{}\" rx=\"1\"/>{}</g>",
            ROW - 1.0,
            self.colour(),
            self.label(x, y, width),
            name = escaped(&self.name),
            ms = self.ns as f64 / 1e6,
        );
        let mut x = x;
        for frame in &self.above {
            frame.draw(out, (x, y - ROW), scale, all);
            x += frame.ns as f64 * scale;
        }
    }

    /// The name, as much of it as there is room for.
    fn label(&self, x: f64, y: f64, width: f64) -> String {
        let room = ((width - 4.0) / LETTER).max(0.0) as usize;
        let text: String = match self.name.chars().count() {
            count if count <= room => self.name.clone(),
            _ if room >= 4 => self.name.chars().take(room - 2).chain("..".chars()).collect(),
            _ => return String::new(),
        };
        format!("<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", x + 2.0, y + 11.5, escaped(&text))
    }

    /// By kind, its shade by name.
    fn colour(&self) -> String {
        let shade = self.name.bytes().fold(7u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into())) % 40;
        let (red, green, blue) = match self.kind {
            Kind::Own => (110 + shade, 160 + shade, 225),
            Kind::User => (225, 190 + shade, 90 + shade),
            Kind::Kernel => (230, 110 + shade, 70 + shade),
        };
        format!("rgb({red},{green},{blue})")
    }
}

fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, letter| {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            control if control.is_control() => out.push(' '),
            other => out.push(other),
        }
        out
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_as_wide_as_their_time_and_stand_on_their_callers() {
        let mut root = Frame::new("all", Kind::Own);
        root.add([("phases", Kind::Own), ("fault and zero", Kind::Own)], 3_000_000);
        root.add([("cpu", Kind::Own), ("work", Kind::User), ("clear_page_erms", Kind::Kernel)], 500_000);
        root.add([("cpu", Kind::Own), ("Vec<&str>::new", Kind::User)], 250_000);
        root.add([("cpu", Kind::Own), ("work", Kind::User)], 250_000);
        let svg = root.svg("one & two");
        assert!(svg.starts_with("<?xml") && svg.ends_with("</svg>\n") && svg.contains("one &amp; two"));
        let title = |name: &str, ms: &str, share: &str| format!("<title>{name} ({ms} ms, {share} %)</title>");
        for (name, ms, share) in [
            ("all", "4.000", "100.00"),
            ("phases", "3.000", "75.00"),
            ("fault and zero", "3.000", "75.00"),
            ("work", "0.750", "18.75"),
            ("clear_page_erms", "0.500", "12.50"),
            ("Vec&lt;&amp;str&gt;::new", "0.250", "6.25"),
        ] {
            assert_eq!(svg.matches(&title(name, ms, share)).count(), 1, "{name} in {svg}");
        }
        // Place and width of a frame.
        let rect = |name: &str| -> Vec<f64> {
            let (_, after) = svg.split_once(&format!("<title>{name} (")).unwrap();
            let number = |key: &str| after.split_once(key).unwrap().1.split('"').next().unwrap().parse().unwrap();
            vec![number(" x=\""), number(" y=\""), number(" width=\"")]
        };
        assert_eq!(rect("all")[2], 1180.0);
        assert_eq!((rect("phases")[0], rect("phases")[2]), (10.0, 885.0));
        assert_eq!(rect("cpu")[0], 895.0);
        assert_eq!(rect("work")[1], rect("cpu")[1] - 16.0);
        assert_eq!((rect("clear_page_erms")[0], rect("clear_page_erms")[1]), (rect("work")[0], rect("work")[1] - 16.0));
        // Sorted by name, whatever came first.
        assert!(rect("Vec&lt;&amp;str&gt;::new")[0] < rect("work")[0]);
    }

    #[test]
    fn what_nothing_was_spent_on_is_still_a_graph() {
        let svg = Frame::new("all", Kind::Own).svg("nothing");
        assert!(svg.contains("</svg>") && !svg.contains("NaN"));
    }
}
