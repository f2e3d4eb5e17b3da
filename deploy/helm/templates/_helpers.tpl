{{- define "cog-triton.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "cog-triton.fullname" -}}
{{- $name := include "cog-triton.name" . }}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $full | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "cog-triton.selector" -}}
app.kubernetes.io/name: {{ include "cog-triton.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "cog-triton.labels" -}}
{{ include "cog-triton.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Labels of the pods that answer requests. */}}
{{- define "cog-triton.servers" -}}
{{ include "cog-triton.selector" . }}
app.kubernetes.io/component: {{ gt (int .Values.nodes) 1 | ternary "leader" "server" }}
{{- end }}

{{- define "cog-triton.image" -}}
{{- with .Values.image }}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ include "cog-triton.setting" .tag }}{{ end }}
{{- end }}
{{- end }}

{{- /* Whether the chart writes model.json. */}}
{{- define "cog-triton.vllm" -}}
{{- if or .Values.model.hub .Values.model.vllm }}true{{ end }}
{{- end }}

{{- /* Whether several nodes are one mpirun; otherwise vLLM's own nodes. */}}
{{- define "cog-triton.mpi" -}}
{{- if and (gt (int .Values.nodes) 1) (not (include "cog-triton.vllm" .)) }}true{{ end }}
{{- end }}

{{- define "cog-triton.weights" -}}
{{- with .Values.model }}
{{- if include "cog-triton.vllm" $ }}/model
{{- else if .claim }}{{ printf "/models/%s" .path | trimSuffix "/" }}
{{- else }}{{ .url }}
{{- end }}
{{- end }}
{{- end }}

{{- define "cog-triton.model.json" -}}
{{- $model := .Values.model.hub | default (printf "/models/%s" .Values.model.path | trimSuffix "/") }}
{{- $arguments := dict "model" $model }}
{{- if gt (int .Values.gpus) 1 }}
{{- $_ := set $arguments "tensor_parallel_size" (int .Values.gpus) }}
{{- end }}
{{- if gt (int .Values.nodes) 1 }}
{{- $_ := set $arguments "nnodes" (int .Values.nodes) }}
{{- if not (hasKey .Values.model.vllm "tensor_parallel_size") }}
{{- $_ := set $arguments "pipeline_parallel_size" (int .Values.nodes) }}
{{- end }}
{{- end }}
{{- merge (deepCopy .Values.model.vllm) $arguments | toPrettyJson }}
{{- end }}

{{- define "cog-triton.serve.yaml" -}}
{{- $serve := deepCopy .Values.serve }}
{{- if include "cog-triton.mpi" . }}
{{- $nodes := dict "tensorrt_llm" (dict "args" (dict "num_nodes" (int .Values.nodes))) }}
{{- $serve = mergeOverwrite $serve $nodes }}
{{- end }}
{{- with $serve }}{{ toYaml . }}{{ end }}
{{- end }}

{{- /* Whether there is a ConfigMap. */}}
{{- define "cog-triton.config" -}}
{{- include "cog-triton.vllm" . }}{{ include "cog-triton.serve.yaml" . }}
{{- end }}

{{- /* A number as it was written: Helm's are floating point, and print as 4.294967296e+09. */}}
{{- define "cog-triton.setting" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* What the schema cannot say: values that need, or exclude, one another. */}}
{{- define "cog-triton.check" -}}
{{- $sources := list }}
{{- range $name := list "claim" "hub" "url" }}
{{- if index $.Values.model $name }}{{ $sources = append $sources (print "model." $name) }}{{ end }}
{{- end }}
{{- with .Values }}
{{- if not .image.repository }}
{{- fail "image.repository: set it to an image that you pushed (docs/images.md)" }}
{{- end }}
{{- if not $sources }}
{{- fail "model: set one of model.claim, model.hub and model.url" }}
{{- end }}
{{- if gt (len $sources) 1 }}
{{- fail (printf "%s: set one of them alone" (join ", " $sources)) }}
{{- end }}
{{- if and .model.path (not .model.claim) }}
{{- fail "model.path: is in model.claim, which is not set" }}
{{- end }}
{{- if and .model.vllm .model.url }}
{{- fail "model.vllm: not with model.url: put a model.json into the tar" }}
{{- end }}
{{- if .model.vllm.model }}
{{- fail "model.vllm.model: set model.hub, or model.claim and model.path" }}
{{- end }}
{{- if and (gt (int .nodes) 1) (lt (int .gpus) 1) }}
{{- fail "gpus: needed for several nodes" }}
{{- end }}
{{- $several := or (gt (int .replicas) 1) .keda.enabled (gt (int .nodes) 1) }}
{{- if include "cog-triton.mpi" $ }}
{{- if not .ssh.existingSecret }}{{ fail "ssh.existingSecret: needed for several nodes" }}{{ end }}
{{- if not (and .model.claim .work.claim) }}
{{- fail "model.claim, work.claim: needed for several nodes, ReadWriteMany; they may be the same" }}
{{- end }}
{{- else if .ssh.existingSecret }}
{{- fail "ssh.existingSecret: for several nodes of TensorRT-LLM; vLLM's need no ssh" }}
{{- else if and .work.claim $several }}
{{- fail "work.claim: for one replica of one node; several need a work.storageClass, or neither" }}
{{- end }}
{{- if and .work.claim .work.storageClass }}
{{- fail "work.claim, work.storageClass: set one of them alone" }}
{{- end }}
{{- if and .work.storageClass (not .work.size) }}
{{- fail "work.size: needed with work.storageClass" }}
{{- end }}
{{- if and .keda.enabled (not .keda.prometheus) }}
{{- fail "keda.prometheus: needed with keda.enabled" }}
{{- end }}
{{- if .gateway.endpointPicker.enabled }}
{{- if not .gateway.enabled }}
{{- fail "gateway.endpointPicker.enabled: needs gateway.enabled" }}
{{- end }}
{{- if not .gateway.endpointPicker.image }}
{{- fail "gateway.endpointPicker.image: needed with gateway.endpointPicker.enabled" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
