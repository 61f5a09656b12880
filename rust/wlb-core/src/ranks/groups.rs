//! Groups of documents that stay on one rank.

use std::collections::BTreeMap;

use crate::balance::{Item, sort};

/// The documents of each group, groups in order of their first documents. Without groups each document is a group.
pub(super) fn members(documents: usize, groups: &[i64]) -> Vec<Vec<u32>> {
    if groups.is_empty() {
        return (0..documents as u32).map(|index| vec![index]).collect();
    }
    let mut places = BTreeMap::new();
    let mut members: Vec<Vec<u32>> = Vec::new();
    for (&group, index) in groups.iter().zip(0..) {
        let place = *places.entry(group).or_insert(members.len());
        if place == members.len() {
            members.push(Vec::new());
        }
        members[place].push(index);
    }
    members
}

/// Each group as one item, costliest first.
pub(super) fn groups(members: &[Vec<u32>], lengths: &[i32], costs: &[f64]) -> Vec<Item> {
    let item = |(index, members): (usize, &Vec<u32>)| Item {
        cost: members.iter().map(|&document| costs[document as usize]).sum(),
        tokens: members.iter().map(|&document| i64::from(lengths[document as usize])).sum(),
        documents: members.len() as u32,
        index: index as u32,
    };
    let mut items: Vec<Item> = members.iter().enumerate().map(item).collect();
    sort(&mut items);
    items
}
