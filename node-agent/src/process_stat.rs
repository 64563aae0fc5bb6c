//! /proc/PID/stat (proc(5)).

/// The number in field `number` of the text, counted from 1 as in proc(5). Only for fields after the second, the program's name, which is
/// in parentheses and may hold anything.
pub fn field(stat: &str, number: usize) -> Option<u64> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    let index = number.checked_sub(3)?;
    behind_name.split_whitespace().nth(index)?.parse().ok()
}
