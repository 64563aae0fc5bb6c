//! Amounts of memory and disk as people write and read them: `8Gi`, as everywhere in Kubernetes.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes, written as `8Gi`, `1.5Ti` or `500M`, or as a plain number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity(u64);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    #[error(
        "{found:?} is no amount of bytes; expected a number with one of the units Ki, Mi, Gi, Ti, k, M, G, T, or none, such as 8Gi"
    )]
    Form { found: String },
    #[error("{found} is more than any machine has: at most 1024Ti")]
    TooMuch { found: String },
}

/// What the API server lets through. Larger numbers are refused by the checks of the documents.
const PATTERN: &str = "^[0-9]{1,16}([.][0-9]{1,9})?(Ki|Mi|Gi|Ti|k|M|G|T)?$";
/// 1 PiB.
pub const MAX_BYTES: u64 = 1 << 50;

const UNITS: [(&str, u64); 8] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

impl Quantity {
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl From<Quantity> for u64 {
    fn from(quantity: Quantity) -> Self {
        quantity.0
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    /// # Errors
    /// For any other form, and for more than a pebibyte.
    fn from_str(text: &str) -> Result<Self, QuantityError> {
        let form = || QuantityError::Form {
            found: text.chars().take(40).collect(),
        };
        let too_much = || QuantityError::TooMuch {
            found: text.to_owned(),
        };
        let (number, unit) = UNITS
            .iter()
            .find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, *bytes)))
            .unwrap_or((text, 1));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str, most: usize| {
            (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
        };
        if !digits(whole, 16) || !digits(fraction, 9) {
            return Err(form());
        }
        // At most 16 and 9 digits: both fit.
        let whole: u64 = whole.parse().map_err(|_| form())?;
        let fraction_of: u64 = fraction.parse().map_err(|_| form())?;
        let scale = 10_u128.pow(fraction.len() as u32);
        let fraction = u128::from(fraction_of) * u128::from(unit) / scale;
        let bytes = u128::from(whole) * u128::from(unit) + fraction;
        match u64::try_from(bytes) {
            Ok(bytes) if bytes <= MAX_BYTES => Ok(Self(bytes)),
            _ => Err(too_much()),
        }
    }
}

/// The shortest exact form.
impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |(_, unit): &&(&str, u64)| self.0 > 0 && self.0.is_multiple_of(*unit);
        match UNITS[..4].iter().rev().find(exact) {
            Some((name, unit)) => write!(f, "{}{name}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringOrNumber;

        impl Visitor<'_> for StringOrNumber {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an amount of bytes, such as 8Gi")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Quantity, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Quantity, E> {
                self.visit_str(&bytes.to_string())
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<Quantity, E> {
                self.visit_str(&bytes.to_string())
            }
        }

        deserializer.deserialize_any(StringOrNumber)
    }
}

impl JsonSchema for Quantity {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Quantity".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "minimum": 0,
            "maxLength": 32,
            "pattern": PATTERN,
        })
    }
}

/// Bytes for people: `12.3 GiB`, `512 MiB`, and below a mebibyte all of them.
pub fn rounded(bytes: u64) -> String {
    for (name, unit) in [("TiB", 1_u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)] {
        let value = bytes as f64 / unit as f64;
        match bytes >= unit {
            true if value >= 99.95 || unit == 1 << 20 => return format!("{value:.0} {name}"),
            true => return format!("{value:.1} {name}"),
            false => {}
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn quantities_read_as_kubernetes_reads_them() {
        for (text, bytes) in [
            ("8Gi", 8 * GIB),
            ("1.5Gi", 3 * GIB / 2),
            ("0.000000001Gi", 1),
            ("500M", 500_000_000),
            ("2k", 2000),
            ("1Ki", 1024),
            ("3T", 3_000_000_000_000),
            ("0", 0),
            ("8589934592", 8 * GIB),
            ("1024Ti", MAX_BYTES),
        ] {
            assert_eq!(text.parse(), Ok(Quantity(bytes)), "{text}");
            let yaml: Quantity = serde_json::from_value(json!(text)).unwrap();
            assert_eq!(yaml.bytes(), bytes);
        }
        let number: Quantity = serde_json::from_value(json!(8 * GIB)).unwrap();
        assert_eq!(number.bytes(), 8 * GIB);
    }

    #[test]
    fn what_is_no_quantity_is_refused_with_an_example() {
        for text in [
            "",
            "Gi",
            "8GB",
            "8 Gi",
            "-1",
            "+1",
            "1e9",
            "1.",
            ".5",
            "8gi",
            "8GiB",
            "0x1",
            "1.2.3",
            "١Gi",
            "1.0000000000Gi",
        ] {
            let error = text.parse::<Quantity>().unwrap_err().to_string();
            assert!(error.contains("such as 8Gi"), "{text}: {error}");
        }
        for text in ["1025Ti", "9999999999999999", "9999999999999999Ti"] {
            let error = text.parse::<Quantity>().unwrap_err();
            assert!(matches!(error, QuantityError::TooMuch { .. }), "{text}");
        }
        for value in [json!(-1), json!(1.5), json!(true), json!(null), json!({})] {
            serde_json::from_value::<Quantity>(value).unwrap_err();
        }
    }

    #[test]
    fn it_is_written_short_and_exact() {
        for (bytes, text) in [
            (8 * GIB, "8Gi"),
            (3 * GIB / 2, "1536Mi"),
            (1 << 40, "1Ti"),
            (1000, "1000"),
            (0, "0"),
        ] {
            let quantity = Quantity(bytes);
            assert_eq!(quantity.to_string(), text);
            assert_eq!(text.parse(), Ok(quantity));
            assert_eq!(serde_json::to_value(quantity).unwrap(), json!(text));
        }
    }

    #[test]
    fn people_read_two_or_three_digits() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (93_000_000, "89 MiB"),
            (8 * GIB, "8.0 GiB"),
            (GIB + GIB / 4, "1.2 GiB"),
            (120 * GIB, "120 GiB"),
            (3 << 40, "3.0 TiB"),
        ] {
            assert_eq!(rounded(bytes), text);
        }
    }
}
