//! One token's way round the ring as a picture: a row per member, time from left to right, what it does in colours. An SVG
//! without scripts or fonts of its own, readable on light and dark pages.

use std::fmt::Write;

use prima_halda::Plan;
use prima_halda::plan::MemberReport;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 140.0;
const RIGHT: f64 = 48.0;
const TOP: f64 = 72.0;
const ROW: f64 = 34.0;
const BAR: f64 = 20.0;

/// What a member does with time, and its colour.
const KINDS: [(&str, &str); 5] = [
    ("CPU", "#2a78d6"),
    ("GPU", "#1f9d55"),
    ("output head", "#7a5ccf"),
    ("waiting for the disk", "#d64545"),
    ("network", "#8a8f98"),
];

pub fn svg(plan: &Plan) -> String {
    let report = &plan.report;
    let total = report.tpot_milliseconds.max(f64::MIN_POSITIVE);
    let height = TOP + ROW * report.members.len() as f64 + 48.0;
    let x = |at: f64| LEFT + at / total * (WIDTH - LEFT - RIGHT);
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12">
<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>
<text x="16" y="26" font-size="15" fill="#1b1f24">One token of {}: {:.1} ms, {} rounds</text>"##,
        escaped(&report.model),
        report.tpot_milliseconds,
        report.rounds
    );
    let mut legend = 16.0;
    for (name, color) in KINDS {
        let _ = writeln!(
            svg,
            r##"<rect x="{legend:.0}" y="40" width="12" height="12" fill="{color}"/><text x="{:.0}" y="50" fill="#57606a">{name}</text>"##,
            legend + 18.0
        );
        legend += 40.0 + 7.0 * name.len() as f64;
    }
    for (row, member) in report.members.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let _ = writeln!(
            svg,
            r##"<text x="{:.0}" y="{:.1}" text-anchor="end" fill="#1b1f24">{}</text><line x1="{LEFT}" y1="{:.1}" x2="{:.0}" y2="{:.1}" stroke="#e3e6ea"/>"##,
            LEFT - 10.0,
            y + 15.0,
            escaped(&member.name),
            y + BAR / 2.0,
            WIDTH - RIGHT,
            y + BAR / 2.0
        );
    }
    let mut now = 0.0;
    for _ in 0..report.rounds {
        for (row, member) in report.members.iter().enumerate() {
            for ((name, color), part) in KINDS.iter().zip(parts(member)) {
                // The head comes once, behind the last round.
                let part = if *name == "output head" { 0.0 } else { part };
                let length = part / report.rounds as f64;
                bar(
                    &mut svg,
                    (x(now), x(now + length)),
                    row,
                    color,
                    name,
                    length,
                );
                now += length;
            }
        }
    }
    if let Some(rank0) = report.members.first() {
        let (name, color) = KINDS[2];
        let length = rank0.head_milliseconds;
        bar(&mut svg, (x(now), x(now + length)), 0, color, name, length);
    }
    let bottom = TOP + ROW * report.members.len() as f64 + 20.0;
    for i in 0..=4 {
        let at = total * f64::from(i) / 4.0;
        let _ = writeln!(
            svg,
            r##"<text x="{:.1}" y="{bottom:.1}" text-anchor="middle" fill="#57606a">{at:.1} ms</text>"##,
            x(at)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Milliseconds of each of [`KINDS`].
fn parts(member: &MemberReport) -> [f64; 5] {
    [
        member.cpu_milliseconds,
        member.gpu_milliseconds + member.copy_milliseconds,
        member.head_milliseconds,
        member.disk_milliseconds,
        member.hop_milliseconds,
    ]
}

fn bar(svg: &mut String, (from, to): (f64, f64), row: usize, color: &str, name: &str, length: f64) {
    if length > 0.0 {
        let y = TOP + ROW * row as f64;
        let _ = writeln!(
            svg,
            r##"<rect x="{from:.2}" y="{y:.1}" width="{:.2}" height="{BAR}" fill="{color}"><title>{name}: {length:.2} ms</title></rect>"##,
            (to - from).max(0.2)
        );
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
