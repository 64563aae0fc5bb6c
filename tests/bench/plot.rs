//! The cost of hops and the gain of reading ahead as pictures: SVG without scripts or fonts of its own, readable on light and dark pages.

use std::fmt::Write;

use crate::hop_cost::{HopCost, Ring};
use prima_tests::machine::Limits;

use crate::machines::{FOUR, Outcome, READINGS, Reading, TWO};
use prima_tests::statistics::{Line, Samples};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 48.0;
const RING: &str = "#2a78d6";
const TCP: &str = "#8a8f98";

/// Milliseconds per token over hops: medians, their spread, and the straight lines through the medians.
pub fn hops(cost: &HopCost) -> String {
    let last_hop = cost.rings.iter().map(Ring::hops).max().unwrap_or(1) as f64;
    let highest = cost
        .rings
        .iter()
        .map(|ring| ring.ring.largest().max(ring.tcp.largest()))
        .fold(0.1, f64::max);
    let axes = Axes {
        last_hop,
        step: nice_step(highest),
        highest,
    };
    let (ring, tcp) = cost.lines();
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="12">
<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>
<text x="{LEFT}" y="24" font-size="14" fill="#1b1f24">What hops add to a token: {} bytes a hop, loopback</text>"##,
        cost.bytes
    );
    axes.draw(&mut svg);
    series(&mut svg, &axes, cost, TCP, tcp, |ring| &ring.tcp);
    series(&mut svg, &axes, cost, RING, ring, |ring| &ring.ring);
    legend(
        &mut svg,
        0.0,
        RING,
        &format!(
            "ring: {:.3} ms per hop, {:.2} ms besides",
            ring.slope,
            cost.fixed()
        ),
    );
    legend(
        &mut svg,
        1.0,
        TCP,
        &format!("bare TCP: {:.3} ms per hop", tcp.slope),
    );
    svg.push_str("</svg>\n");
    svg
}

/// Tokens per second of rings of machines, by how weights that do not fit are read: a bar each.
pub fn reading(outcomes: &[Outcome]) -> String {
    const BAR: f64 = 18.0;
    const LABEL: f64 = 300.0;
    let rings = [TWO, FOUR];
    let bars = |machines: &'static [Limits]| {
        let of = move |reading| {
            outcomes.iter().filter(move |one| {
                one.setting.machines == machines && one.setting.reading == reading
            })
        };
        READINGS
            .into_iter()
            .flat_map(|(reading, name)| of(reading).map(move |one| (one, name)))
            .collect::<Vec<_>>()
    };
    let all = rings.into_iter().flat_map(bars);
    let highest = all
        .map(|(one, _)| one.measured.median())
        .fold(0.01, f64::max);
    let mut y = 44.0;
    let mut rows = String::new();
    for machines in rings {
        let bars = bars(machines);
        let Some((first, _)) = bars.first() else {
            continue;
        };
        y += 14.0;
        // Writing to a String cannot fail.
        let _ = writeln!(
            rows,
            r##"<text x="16" y="{y:.0}" fill="#1b1f24" font-weight="600">{}</text>"##,
            first.setting.describe_machines()
        );
        y += 8.0;
        for (one, name) in bars {
            let rounds = one.setting.rounds;
            let value = one.measured.median();
            let color = if one.setting.reading == Reading::Ahead {
                RING
            } else {
                TCP
            };
            let _ = writeln!(
                rows,
                r##"<text x="{:.0}" y="{:.0}" text-anchor="end" fill="#57606a">{}, k = {rounds}</text><rect x="{LABEL}" y="{y:.0}" width="{:.1}" height="{BAR}" rx="2" fill="{color}"/><text x="{:.1}" y="{:.0}" fill="#1b1f24">{value:.2}</text>"##,
                LABEL - 8.0,
                y + 13.0,
                name,
                value / highest * (WIDTH - LABEL - 64.0),
                LABEL + value / highest * (WIDTH - LABEL - 64.0) + 6.0,
                y + 13.0
            );
            y += BAR + 5.0;
        }
        y += 8.0;
    }
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0}" font-family="system-ui, sans-serif" font-size="12">
<rect width="{WIDTH}" height="{y:.0}" rx="6" fill="#ffffff"/>
<text x="16" y="24" font-size="14" fill="#1b1f24">Tokens per second of a model of 4.9 GB in rings of machines that cannot hold it</text>
{rows}</svg>
"##
    )
}

struct Axes {
    last_hop: f64,
    step: f64,
    highest: f64,
}

impl Axes {
    fn x(&self, hops: f64) -> f64 {
        LEFT + hops / self.last_hop * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, milliseconds: f64) -> f64 {
        let top = (self.highest / self.step).ceil() * self.step;
        HEIGHT - BOTTOM - milliseconds / top * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self, svg: &mut String) {
        let lines = (self.highest / self.step).ceil() as usize;
        for i in 0..=lines {
            let value = i as f64 * self.step;
            let y = self.y(value);
            let _ = writeln!(
                svg,
                r##"<line x1="{LEFT}" y1="{y:.1}" x2="{:.1}" y2="{y:.1}" stroke="#e3e6ea"/><text x="{:.1}" y="{:.1}" text-anchor="end" fill="#57606a">{value:.2}</text>"##,
                WIDTH - RIGHT,
                LEFT - 8.0,
                y + 4.0
            );
        }
        for hops in (0..=self.last_hop as usize).step_by(5) {
            let _ = writeln!(
                svg,
                r##"<text x="{:.1}" y="{:.1}" text-anchor="middle" fill="#57606a">{hops}</text>"##,
                self.x(hops as f64),
                HEIGHT - BOTTOM + 18.0
            );
        }
        let _ = writeln!(
            svg,
            r##"<text x="{:.1}" y="{:.1}" text-anchor="middle" fill="#57606a">hops per token (members x rounds)</text>
<text transform="translate(16 {:.1}) rotate(-90)" text-anchor="middle" fill="#57606a">ms per token</text>"##,
            (LEFT + WIDTH - RIGHT) / 2.0,
            HEIGHT - 10.0,
            (TOP + HEIGHT - BOTTOM) / 2.0
        );
    }
}

fn series(
    svg: &mut String,
    axes: &Axes,
    cost: &HopCost,
    color: &str,
    line: Line,
    of: fn(&Ring) -> &Samples,
) {
    let _ = writeln!(
        svg,
        r#"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" stroke="{color}" stroke-width="1.5" stroke-dasharray="5 4"/>"#,
        axes.x(0.0),
        axes.y(line.at(0.0)),
        axes.x(axes.last_hop),
        axes.y(line.at(axes.last_hop))
    );
    for ring in &cost.rings {
        let (x, samples) = (axes.x(ring.hops() as f64), of(ring));
        let _ = writeln!(
            svg,
            r#"<line x1="{x:.1}" y1="{:.1}" x2="{x:.1}" y2="{:.1}" stroke="{color}" opacity="0.5"/><circle cx="{x:.1}" cy="{:.1}" r="4" fill="{color}"/>"#,
            axes.y(samples.smallest()),
            axes.y(samples.largest()),
            axes.y(samples.median())
        );
    }
}

fn legend(svg: &mut String, row: f64, color: &str, text: &str) {
    let y = TOP + 14.0 + 18.0 * row;
    let _ = writeln!(
        svg,
        r##"<circle cx="{:.1}" cy="{:.1}" r="4" fill="{color}"/><text x="{:.1}" y="{y:.1}" fill="#1b1f24">{text}</text>"##,
        LEFT + 16.0,
        y - 4.0,
        LEFT + 28.0
    );
}

/// A step of 1, 2 or 5 times a power of ten that gives four to ten lines up to `highest`.
fn nice_step(highest: f64) -> f64 {
    let rough = highest / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0]
        .into_iter()
        .find(|factor| factor * power >= rough);
    factor.unwrap_or(10.0) * power
}
