{{/* What the operator may do to fleets and what they are made of: verb by verb, no wildcard, of Secrets nothing but to make them. e2e/test_helm.py compares
     it with the requests that the operator really makes: no verb is missing, none is there for nothing. It may create a router's
     Role because it holds each right that this Role grants. */}}
{{- define "inferencefleet.rules" -}}
# the claim on a namespace, so that never two installations run the fleets there
{{- if .Values.namespaceSelector }}
# (listed and deleted, too: a namespace may lose its label, and is watched for that)
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [list]}
- {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [inferencefleet-owner], verbs: [get, create, patch, delete]}
- {apiGroups: [""], resources: [namespaces], verbs: [list, watch]}
{{- else }}
- {apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [inferencefleet-owner], verbs: [get, create, patch]}
{{- end }}
# patch: the finalizer of fleets with spec.deletion
- {apiGroups: [inferencefleet.io], resources: [inferencefleets], verbs: [list, watch, patch]}
{{- if .Values.webhooks.enabled }}
# a pool that is scaled is judged by its fleet
- {apiGroups: [inferencefleet.io], resources: [inferencefleets, workerpools], verbs: [get]}
{{- end }}
- {apiGroups: [inferencefleet.io], resources: [inferencefleets/status, workerpools/status], verbs: [patch]}
# blockOwnerDeletion on a child needs the right to set the owner's finalizers (where the API server enforces it, as on OpenShift)
- {apiGroups: [inferencefleet.io], resources: [inferencefleets/finalizers, workerpools/finalizers], verbs: [update]}
- {apiGroups: [inferencefleet.io], resources: [workerpools], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [""], resources: [pods], verbs: [list, watch, create, patch, delete]}
# get: only because the routers' Roles grant it
- {apiGroups: [""], resources: [configmaps], verbs: [get, list, watch, create, patch]}
- {apiGroups: [""], resources: [serviceaccounts], verbs: [list, watch, create, patch]}
- {apiGroups: [""], resources: [services], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [apps], resources: [deployments], verbs: [list, watch, create, patch]}
# patch: their content never changes, but labels that somebody took away come back
- {apiGroups: [apps], resources: [controllerrevisions], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [policy], resources: [poddisruptionbudgets], verbs: [list, watch, create, patch, delete]}
- {apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [list, watch, create, patch, delete]}
# one per pool of a tier with kvTransfer.via dra; written before its pods, gone with the pool, never watched
- {apiGroups: [resource.k8s.io], resources: [resourceclaimtemplates], verbs: [create, patch]}
{{- with .Values.rbac.podGroups }}
{{- $groups := dict "coscheduling" "scheduling.x-k8s.io" "volcano" "scheduling.volcano.sh" "kubernetes" "scheduling.k8s.io" }}
# one per worker over several nodes; written before its pods, deleted with them, never watched
{{- range . }}
- {apiGroups: [{{ get $groups . }}], resources: [podgroups], verbs: [create, patch, delete]}
{{- end }}
{{- end }}
- {apiGroups: [rbac.authorization.k8s.io], resources: [roles, rolebindings], verbs: [list, watch, create, patch]}
{{- if .Values.peerKeys.create }}
# the key that a fleet's pods share: made, and never read, listed, changed or deleted
- {apiGroups: [""], resources: [secrets], verbs: [create]}
{{- end }}
# events are written and never read back
- {apiGroups: [events.k8s.io], resources: [events], verbs: [create]}
{{- end -}}

{{/* What no namespaced Role can give. */}}
{{- define "inferencefleet.clusterRules" -}}
{{- if .Values.rbac.nodes }}
- {apiGroups: [""], resources: [nodes], verbs: [list, watch]}
{{- end }}
{{- if .Values.webhooks.enabled }}
# only caBundle is written, and only in these two
- apiGroups: [admissionregistration.k8s.io]
  resources: [mutatingwebhookconfigurations, validatingwebhookconfigurations]
  resourceNames: [{{ include "inferencefleet.webhookConfiguration" . | quote }}]
  verbs: [get, patch]
{{- end }}
{{- end -}}
