// SPDX-License-Identifier: Apache-2.0
//! Serde's side of the text forms: a key of `vm.toml` takes its table or what the flag would take.
//!
//! `memory = "1G"`, `memory = { size = "1G" }`, `cpus = 4` and `disk = ["root.raw"]` all read. Used by `vm` and by the
//! command line's own struct for the file.

use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::parse::{FromText, parse_on_off, parse_size};
use crate::{Backing, Paths, SpecError};

/// A value given as its text form, a number, or a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said<T>(pub T);

impl<'de, T: FromText + Deserialize<'de>> Deserialize<'de> for Said<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrTable<T>(PhantomData<T>);

        impl<'de, T: FromText + Deserialize<'de>> Visitor<'de> for TextOrTable<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a number or a table")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
                T::from_text(text).map_err(E::custom)
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<T, E> {
                self.visit_str(if value { "true" } else { "false" })
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
                self.visit_str(&value.to_string())
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
                self.visit_str(&value.to_string())
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }

        deserializer.deserialize_any(TextOrTable(PhantomData)).map(Said)
    }
}

/// For `#[serde(deserialize_with)]` on a field of type `T`.
///
/// # Errors
/// What the text form or the table says.
pub fn said<'de, D: Deserializer<'de>, T: FromText + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Said::deserialize(deserializer).map(|Said(value)| value)
}

/// For `#[serde(deserialize_with)]` on a field of type `Vec<T>`.
///
/// # Errors
/// What the text form or the table of any element says.
pub fn said_each<'de, D: Deserializer<'de>, T: FromText + Deserialize<'de>>(d: D) -> Result<Vec<T>, D::Error> {
    Vec::<Said<T>>::deserialize(d).map(|all| all.into_iter().map(|Said(value)| value).collect())
}

/// For `deserialize_with` on a value whose text form is a list with commas: the text, a number, or a list of either.
///
/// # Errors
/// What the text form says.
pub(crate) fn text_or_list<'de, D: Deserializer<'de>, T: FromText + Default>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Item {
        Text(String),
        Number(u64),
    }

    struct TextOrList<T>(PhantomData<T>);

    impl<'de, T: FromText + Default> Visitor<'de> for TextOrList<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a string or a list")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            T::from_text(text).map_err(E::custom)
        }

        fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
            self.visit_str(&value.to_string())
        }

        fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
            self.visit_str(&value.to_string())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<T, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = seq.next_element()? {
                items.push(match item {
                    Item::Text(text) => text,
                    Item::Number(number) => number.to_string(),
                });
            }
            if items.is_empty() { Ok(T::default()) } else { self.visit_str(&items.join(",")) }
        }
    }

    deserializer.deserialize_any(TextOrList(PhantomData))
}

/// Text, or a list of paths.
#[derive(Deserialize)]
#[serde(untagged)]
enum TextOrPaths {
    Text(String),
    Paths(Vec<PathBuf>),
}

impl<'de> Deserialize<'de> for Paths {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match TextOrPaths::deserialize(deserializer)? {
            TextOrPaths::Text(text) => Self::from_text(&text).map_err(D::Error::custom),
            TextOrPaths::Paths(paths) => Ok(Self(paths)),
        }
    }
}

impl<'de> Deserialize<'de> for Backing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match TextOrPaths::deserialize(deserializer)? {
            TextOrPaths::Text(text) => Self::from_text(&text).map_err(D::Error::custom),
            TextOrPaths::Paths(paths) => Ok(Self::Listed(Paths(paths))),
        }
    }
}

impl Serialize for Backing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_str("none"),
            Self::Folder => serializer.serialize_str("folder"),
            Self::Any => serializer.serialize_str("any"),
            Self::Listed(paths) => paths.serialize(serializer),
        }
    }
}

/// A size inside a table.
#[derive(Deserialize)]
struct Size(u64);

impl FromText for Size {
    fn from_text(text: &str) -> Result<Self, SpecError> {
        parse_size("size", text).map(Self)
    }
}

/// A boolean inside a table, `true` or `"on"`.
#[derive(Deserialize)]
struct OnOff(bool);

impl FromText for OnOff {
    fn from_text(text: &str) -> Result<Self, SpecError> {
        parse_on_off("value", text).map(Self)
    }
}

/// For `deserialize_with` on a field of bytes.
pub(crate) fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    said(deserializer).map(|Size(bytes)| bytes)
}

/// For `deserialize_with` on a field of bytes that may be left out.
pub(crate) fn maybe_size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    /// A size in either form.
    struct Either(u64);
    impl<'de> Deserialize<'de> for Either {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            size(deserializer).map(Self)
        }
    }
    Ok(Option::<Either>::deserialize(deserializer)?.map(|Either(bytes)| bytes))
}

/// For `deserialize_with` on a field of fewer than 4 GiB that may be left out.
pub(crate) fn maybe_size32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let bytes = maybe_size(deserializer)?;
    bytes
        .map(|bytes| u32::try_from(bytes).map_err(|_| D::Error::custom(format!("{bytes} bytes are no block"))))
        .transpose()
}

/// For `deserialize_with` on a boolean.
pub(crate) fn on_off<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    said(deserializer).map(|OnOff(value)| value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use crate::{Console, Cpus, Disk, FromText, KernelDecompress, Memory, Vm};

    #[test]
    fn tables_and_text_read_the_same() {
        let text: Vm = serde_json::from_value(json!({
            "kernel": "k", "memory": "1G", "cpus": "4,threads=2", "rng": "off", "kernel-decompress": "guest",
            "disk": ["a.raw,readonly=on", "b.raw"], "console": "serial",
        }))
        .unwrap();
        let table: Vm = serde_json::from_value(json!({
            "kernel": "k", "memory": {"size": 1u64 << 30}, "cpus": {"count": 4, "threads": 2}, "rng": false,
            "kernel-decompress": "guest", "disk": [{"path": "a.raw", "readonly": true}, {"path": "b.raw"}],
            "console": "serial",
        }))
        .unwrap();
        assert_eq!(text, table);
        let expected = Vm {
            memory: Memory { size: 1 << 30, ..Memory::default() },
            cpus: Cpus { threads: Some(2), ..Cpus::flat(4) },
            rng: false,
            kernel_decompress: KernelDecompress::Guest,
            disks: vec![Disk { readonly: true, ..Disk::new("a.raw") }, Disk::new("b.raw")],
            console: Console::Serial,
            ..Vm::new("k")
        };
        assert_eq!(text, expected);
        let back: Vm = serde_json::from_value(serde_json::to_value(&expected).unwrap()).unwrap();
        assert_eq!(back, expected, "what is written reads back");
    }

    #[test]
    fn limits_are_a_table_or_a_group() {
        let disk = |v| serde_json::from_value::<Disk>(v).unwrap();
        let table = disk(json!({"path": "p", "throttle": {"bps": "10M", "iops": 100, "iops-burst": 5},
            "logical-block-size": "4K", "physical-block-size": 4096, "threads": "shared", "queues": 4}));
        assert_eq!(table.throttle, disk(json!({"path": "p", "throttle": "bps=10M,iops=100,iops-burst=5"})).throttle);
        let flag =
            "p,bps=10M,iops=100,iops-burst=5,logical-block-size=4K,physical-block-size=4096,threads=shared,queues=4";
        assert_eq!(Disk::from_text(flag).unwrap(), table);
        let bad = serde_json::from_value::<Disk>(json!({"path": "p", "logical-block-size": "4G"})).unwrap_err();
        assert!(bad.to_string().contains("4294967296 bytes are no block"), "{bad}");
    }

    #[test]
    fn refuses_what_it_does_not_know() {
        let err = |v| serde_json::from_value::<Vm>(v).unwrap_err().to_string();
        assert!(err(json!({"kernel": "k", "colour": 1})).contains("unknown field `colour`"));
        assert!(err(json!({"kernel": "k", "disk": [{"path": "p", "ro": true}]})).contains("unknown field `ro`"));
        assert!(err(json!({"kernel": "k", "memory": "12Q"})).contains("`12Q` is not a size: memory;"));
        assert!(err(json!({"kernel": "k", "cpus": -1})).contains("`-1` is not a number: cpus;"));
        assert!(err(json!({"kernel": "k", "cpus": {"dies": 2}})).contains("unknown field `dies`"));
        assert!(err(json!({"kernel": "k", "cpus": {"sockets": 16, "cores": 16}})).contains("256 virtual CPUs can't"));
        assert!(err(json!({"kernel": "k", "memory": [1]})).contains("expected a string, a number or a table"));
        assert!(err(json!({})).contains("missing field `kernel`"));
    }
}
