//! Every diagnostic code of this crate with the rule behind it, for the reference page.

use ithaca_ir::codes::Code;

const fn code(code: &'static str, rule: &'static str) -> Code {
    Code { code, rule }
}

/// Codes of models, workloads, clusters and plans.
pub const MODEL: &[Code] = &[
    code("M01", "the description of a model is a JSON object"),
    code("M02", "`model_type` names a family that is supported"),
    code("M03", "a field of the description has the JSON type that it needs"),
    code("M04", "a number of the description is in the range that makes sense"),
    code("M05", "no field asks for a computation that is not supported"),
    code("M06", "every field of the description is known, or declared to have no influence"),
    code("M07", "sizes and spellings of the description fit each other"),
    code("M08", "the sequence is not longer than the learned positions"),
    code("M09", "sequences are continued by models that have a cache, within its room"),
    code("M10", "the workload is in range"),
    code("M11", "the checkpoint has a head that is imported"),
    code("M12", "only fields that are not understood are ignored"),
    code("M20", "a cluster is TOML with every key, none unknown, and a source for each number"),
    code("M21", "the figures of a cluster are possible"),
    code("M22", "a cluster's name is that of a built-in profile"),
    code("M23", "measurements are complete tables with right results"),
    code("M24", "the figures of a cluster can meet its measurements"),
    code("M30", "a plan is whole JSON"),
    code("M31", "a plan has every field, none unknown, each of the right kind"),
    code("M32", "a plan has the version that this program reads"),
    code(
        "M33",
        "the parts of a plan agree: digest, GPUs, mesh, pipeline, and whatever it states of its program is so",
    ),
];

/// Codes of passes and of the planner.
pub const PASS: &[Code] = &[
    code("P01", "a pipeline is passes between commas, options in braces"),
    code("P02", "every pass and option of a pipeline is known"),
    code("P03", "a pass runs on the level that it takes"),
    code("P04", "every attention operation of the program was rewritten"),
    code("P05", "a plan records the choices that its program needs, and each of them is possible"),
    code("P06", "a small program that is proven in place of a plan's has every collective of it"),
    code("P10", "every strategy is known, and those of a product use different axes"),
    code("P11", "the mesh has the axes that the strategies use, and no other"),
    code("P12", "a mesh is axes with positive sizes between commas, none named twice"),
    code(
        "P13",
        "strategies of layers are for functions with attention, axes of sequences for sequences of the program; outside attention layers lay out alike",
    ),
    code("P14", "a program to be laid out has operations on whole values only"),
    code("P20", "query heads divide by the head degree"),
    code("P21", "key/value heads are a multiple or a divisor of the head degree"),
    code("P22", "the feed-forward width divides by the tensor degree"),
    code("P23", "every rank has tokens of a sequence that is split unevenly"),
    code("P24", "a sequence that is padded has no order of its own"),
    code("P25", "sequences of the batch divide by the data-parallel degree"),
    code("P26", "the parts of a token order divide the sequence"),
    code("P28", "there are experts to split, and they divide by the expert degree"),
    code("P29", "groups of tokens that share slots of experts are whole on a rank, in a row and not padded"),
    code("P30", "the cluster has the GPUs, and some strategy has a mesh of them"),
    code("P31", "some candidate is legal"),
    code("P32", "some candidate fits in memory"),
    code("P33", "some deployment answers the requests within the targets"),
    code("P34", "the framework that a plan is for, or is exported to, can run its layout"),
    code("P40", "attention whose dropout is keyed by the order of computation is not split"),
    code("P41", "a movement has the number of axes that it takes, and brings keys to queries on those axes"),
    code("P42", "tokens are in an order that the movement takes"),
    code("P43", "the balanced schedule serves causal masks"),
    code("P44", "a halo needs a window, streaming a window and sinks"),
    code(
        "P45",
        "partial results are reduced over keys that are another sequence than the queries, on axes of their own",
    ),
    code("P46", "whole rows of scores have no learned bias and no dropout"),
    code("P47", "every movement is named and known, and its options are known and fit the heads"),
    code("P48", "every block of keys meets every block of queries that sees it, once"),
    code("P49", "a movement that is to leave out what the mask leaves empty can do so"),
    code("P50", "a program to differentiate returns a real scalar `loss`"),
    code(
        "P51",
        "only `@main` calls functions, layers hand on what has gradients, and states are the pass's own",
    ),
    code("P52", "the batch divides into micro-batches, and what is computed of all of it comes from inputs"),
    code(
        "P53",
        "a pipeline has a layer for each stage and each of its chunks, and interleaved stages take micro-batches in groups of as many",
    ),
    code(
        "P54",
        "the stages of a pipeline share whole weights that are not a layer's, and a mesh axis is as long as there are stages",
    ),
    code("P57", "a loss in parts is a sum over tokens, and the tokens of every rank divide into the parts"),
    code("P58", "a pipeline has at most 8192 passes of micro-batches through chunks of layers"),
    code("P60", "a file of rules is `rule NAME pattern => replacement`, conditions behind `where`"),
    code("P61", "every rule has a name of its own"),
    code("P62", "operations and attributes of a rule are known, and have their operands"),
    code("P63", "a rule makes no source and calls no function"),
    code("P64", "what a rule uses is bound by its left side"),
    code("P65", "a pattern binds each variable to one thing, and solves no equations"),
    code("P66", "a rule can be tried on random programs"),
    code("P67", "a rule computes what it replaces"),
];

/// The sections of this crate's codes, with their titles.
pub const SECTIONS: &[(&str, &[Code])] =
    &[("Models, workloads, clusters and plans", MODEL), ("Passes and the planner", PASS)];
