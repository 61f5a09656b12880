//! A golden file: read, answered by an oracle, compared to the byte, written.

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::ser::Formatter;

/// The inputs of a case and the answers to them.
pub(crate) trait Case: Serialize + DeserializeOwned {
    /// The oracle's answers instead of those that are there.
    fn answered(self) -> Self;

    /// The engine gives these answers.
    fn check_engine(&self);
}

/// The file is what the oracle writes, and what the engine computes.
pub(crate) fn hold<C: Case>(name: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    let text = std::fs::read_to_string(&path).unwrap();
    let cases: Vec<C> = serde_json::from_str(&text).unwrap();
    assert!(!cases.is_empty());
    let cases: Vec<C> = cases.into_iter().map(C::answered).collect();
    let lines: Vec<String> = cases.iter().map(line).collect();
    let answered = format!("[\n{}\n]\n", lines.join(",\n"));
    if std::env::var("WLB_GOLDEN").is_ok_and(|todo| todo == "write") {
        std::fs::write(&path, answered).unwrap();
    } else {
        for (number, (found, expected)) in text.lines().zip(answered.lines()).enumerate() {
            assert_eq!(found, expected, "{name}, line {}: the oracle says otherwise", number + 1);
        }
        assert_eq!(text, answered, "{name}");
    }
    cases.iter().for_each(C::check_engine);
}

/// As Python's `json.dumps` writes it.
fn line(case: &impl Serialize) -> String {
    let mut bytes = Vec::new();
    case.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)).unwrap();
    String::from_utf8(bytes).unwrap()
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
