//! Saved states that someone edited.
#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed unwrap is a failed test")]

use std::ops::Range;

use wlb_core::stream::Packer;
use wlb_core::{Error, Lengths};

/// Where the numbers of a JSON text stand, outside of strings.
pub(crate) fn numbers(text: &str) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    let mut in_string = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'"' => in_string = !in_string,
            b'-' | b'+' | b'.' | b'0'..=b'9' | b'e' | b'E' if !in_string => match found.last_mut() {
                Some(last) if last.end == at => last.end += 1,
                // The `e` of `true` starts no number.
                _ if byte.is_ascii_alphabetic() => {}
                _ => found.push(at..at + 1),
            },
            _ => {}
        }
    }
    found
}

/// Signs an edited state anew: its fingerprint and its digest belong to its content again.
///
/// Works on the text that `Packer::save` writes; another text comes back as it was.
pub(crate) fn sign(text: &str) -> String {
    sign_whole(text).unwrap_or_else(|| text.to_owned())
}

fn sign_whole(text: &str) -> Option<String> {
    let config = between(text, "\"config\":", ",\"iteration\":")?;
    let n = between(&text[config.clone()], "\"num_micro_batches\":", ",")?;
    let mut comparable = text[config.clone()].to_owned();
    comparable.replace_range(n, "0");
    let mut text = text.to_owned();
    let fingerprint = between(&text, "\"fingerprint\":\"", "\"")?;
    let signature = blake3::hash(comparable.as_bytes()).to_hex().to_string();
    text.replace_range(fingerprint, &signature);
    sign_digest(&text)
}

/// Signs the content, but leaves the fingerprint of the configuration as it is.
pub(crate) fn sign_digest(text: &str) -> Option<String> {
    let digest = text.rfind("\"digest\":\"")? + "\"digest\":\"".len();
    let unsigned = format!("{}\"}}", text.get(..digest)?);
    Some(format!("{}{}\"}}", &text[..digest], blake3::hash(unsigned.as_bytes()).to_hex()))
}

fn between(text: &str, before: &str, after: &str) -> Option<Range<usize>> {
    let start = text.find(before)? + before.len();
    let end = start + text.get(start..)?.find(after)?;
    Some(start..end)
}

/// An edited state is refused, or is the same packer still.
pub(crate) fn refused_or_equal(text: &str, packer: &Packer) {
    match Packer::load(text) {
        Ok(loaded) => assert_eq!(&loaded, packer, "another packer came out of {text}"),
        Err(Error::State { .. }) => {}
        Err(error) => panic!("not a state error: {error}"),
    }
}

/// Whatever a state said: if it was accepted, the packer works, and nothing panics.
pub(crate) fn works_if_accepted(text: &str) {
    let Ok(mut packer) = Packer::load(text) else { return };
    assert_eq!(Packer::load(&packer.save()).as_ref(), Ok(&packer));
    let config = packer.config().clone();
    // A number of micro-batches that is legal but absurd only takes long.
    if config.num_micro_batches > 4096 {
        return;
    }
    let longest = i64::from(config.max_document_tokens);
    for lengths in [vec![], vec![1, longest, 1], vec![longest; 3]] {
        let pending = packer.pending();
        let Ok(packing) = packer.push(&Lengths::new("lengths", &lengths).unwrap(), None) else { continue };
        assert_eq!(packing.pieces.len() + packer.pending(), pending + lengths.len());
        assert!(packing.tokens.iter().all(|&tokens| tokens <= i64::from(config.max_tokens)));
    }
    let pending = packer.pending();
    assert_eq!(packer.flush().iter().map(|packing| packing.pieces.len()).sum::<usize>(), pending);
}
