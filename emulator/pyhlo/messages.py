"""XLA's messages, with the fields that PyHLO writes or the interpreter reads.

Field numbers are those of OpenXLA's xla/xla_data.proto and xla/service/hlo.proto, so XLA can read these modules.
``metaneff`` describes a compiled program's tensors to the Neuron runtime. Its field numbers are this project's own:
hosts use the names only, and the emulated runtime reads shapes from the module.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from neuronmm.emulator.pyhlo.protobuf import build

_xla = build(
    "xla",
    {
        "PrimitiveType": """
            PRIMITIVE_TYPE_INVALID PRED S8 S16 S32 S64 U8 U16 U32 U64 F16 F32 F64 TUPLE OPAQUE_TYPE C64 BF16 TOKEN
            C128 F8E5M2 F8E4M3FN
        """,
        "RandomDistribution": "RNG_INVALID RNG_UNIFORM RNG_NORMAL",
        "Kind": "UNDEFINED_ALIAS MAY_ALIAS MUST_ALIAS",
    },
    {
        "LayoutProto": "minor_to_major *int64 1 \n memory_space int64 8",
        "ShapeProto": """
            element_type PrimitiveType 2
            dimensions *int64 3
            tuple_shapes *ShapeProto 4
            layout LayoutProto 5
            is_dynamic_dimension *bool 6
        """,
        "ProgramShapeProto": "parameters *ShapeProto 1 \n result ShapeProto 2 \n parameter_names *string 3",
        "LiteralProto": """
            shape ShapeProto 1
            preds *bool 2
            u8s bytes 3
            s32s *int32 4
            s64s *int64 5
            u32s *uint32 6
            u64s *uint64 7
            f32s *float 8
            f64s *double 9
            f16s bytes 11
            bf16s bytes 13
            s8s bytes 15
            u16s bytes 16
            s16s bytes 17
        """,
        "WindowDimension": """
            size int64 1
            stride int64 2
            padding_low int64 3
            padding_high int64 4
            window_dilation int64 5
            base_dilation int64 6
            window_reversal bool 7
        """,
        "Window": "dimensions *WindowDimension 1",
        "GatherDimensionNumbers": """
            offset_dims *int64 1
            collapsed_slice_dims *int64 2
            start_index_map *int64 3
            index_vector_dim int64 4
        """,
        "ScatterDimensionNumbers": """
            update_window_dims *int64 1
            inserted_window_dims *int64 2
            scatter_dims_to_operand_dims *int64 3
            index_vector_dim int64 4
        """,
        "DotDimensionNumbers": """
            lhs_contracting_dimensions *int64 1
            rhs_contracting_dimensions *int64 2
            lhs_batch_dimensions *int64 3
            rhs_batch_dimensions *int64 4
        """,
        "PaddingConfig": "dimensions *PaddingConfig.PaddingConfigDimension 1",
        "PaddingConfig.PaddingConfigDimension": """
            edge_padding_low int64 1
            edge_padding_high int64 2
            interior_padding int64 3
        """,
        "ReplicaGroup": "replica_ids *int64 1",
        "OpMetadata": "op_type string 1 \n op_name string 2 \n source_file string 3 \n source_line int32 4",
        "HloInstructionProto": """
            name string 1
            opcode string 2
            shape ShapeProto 3
            metadata OpMetadata 7
            literal LiteralProto 8
            parameter_number int64 9
            tuple_index int64 13
            dimensions *int64 14
            window Window 15
            slice_dimensions *HloInstructionProto.SliceDimensions 17
            dynamic_slice_sizes *int64 20
            padding_config PaddingConfig 21
            distribution RandomDistribution 23
            epsilon float 24
            feature_index int64 25
            channel_id int64 26
            custom_call_target string 28
            dot_dimension_numbers DotDimensionNumbers 30
            gather_dimension_numbers GatherDimensionNumbers 33
            gather_slice_sizes *int64 34
            id int64 35
            operand_ids *int64 36
            called_computation_ids *int64 38
            backend_config bytes 43
            scatter_dimension_numbers ScatterDimensionNumbers 48
            replica_groups *ReplicaGroup 49
            is_stable bool 60
            comparison_direction string 63
            indices_are_sorted bool 67
            unique_indices bool 69
            use_global_device_ids bool 71
            comparison_type string 72
        """,
        "HloInstructionProto.SliceDimensions": "start int64 1 \n limit int64 2 \n stride int64 3",
        "HloComputationProto": """
            name string 1
            instructions *HloInstructionProto 2
            program_shape ProgramShapeProto 4
            id int64 5
            root_id int64 6
        """,
        "HloInputOutputAliasProto": "entries *HloInputOutputAliasProto.AliasEntryProto 1",
        "HloInputOutputAliasProto.AliasEntryProto": """
            output_shape_index *int64 1
            parameter_number int64 2
            parameter_shape_index *int64 3
            kind Kind 4
        """,
        "HloModuleProto": """
            name string 1
            entry_computation_name string 2
            computations *HloComputationProto 3
            host_program_shape ProgramShapeProto 4
            id int64 5
            entry_computation_id int64 6
            input_output_alias HloInputOutputAliasProto 8
        """,
    },
)

_file = _xla["HloModuleProto"].DESCRIPTOR.file
PrimitiveType: Any = EnumTypeWrapper(_file.enum_types_by_name["PrimitiveType"])
Kind: Any = EnumTypeWrapper(_file.enum_types_by_name["Kind"])
XLA_DATA = {
    name: _xla[name]
    for name in (
        "LayoutProto", "ShapeProto", "ProgramShapeProto", "LiteralProto", "WindowDimension", "Window",
        "GatherDimensionNumbers", "ScatterDimensionNumbers", "DotDimensionNumbers", "PaddingConfig", "ReplicaGroup",
        "OpMetadata",
    )
} | {"PrimitiveType": PrimitiveType}  # fmt: skip
HLO = {
    name: _xla[name]
    for name in ("HloInstructionProto", "HloComputationProto", "HloInputOutputAliasProto", "HloModuleProto")
}
ShapeProto, LiteralProto = _xla["ShapeProto"], _xla["LiteralProto"]
HloInstructionProto, HloModuleProto = _xla["HloInstructionProto"], _xla["HloModuleProto"]

METANEFF = build(
    "metaneff",
    {
        "MetaTensor.DataType": """
            UNDEFINED FLOAT INT32 BYTE STRING BOOL DOUBLE INT8 INT16 INT64 UINT8 UINT16 FLOAT16 BFLOAT16
        """
    },
    {
        "MetaTensor": "name bytes 1 \n shape *int64 2 \n data_type MetaTensor.DataType 3",
        "MetaNeff": """
            input_tensors *MetaTensor 1
            output_tensors *MetaTensor 2
            output_aliases_to *MetaNeff.OutputAliasesToEntry 3
        """,
        "MetaNeff.OutputAliasesToEntry": "key int64 1 \n value int64 2",
    },
)
